"""`python -m instruments.trace FILE…`: what a trace of a GPU says."""

import signal

from instruments.trace_report import main

if hasattr(signal, "SIGPIPE"):  # whoever reads may leave, as `head` does
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
main()
