"""`python -m instruments.trace FILE…`: what a trace of a GPU says."""

from instruments.trace_report import main

main()
