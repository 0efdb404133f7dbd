"""Distributed Data Parallel, built from scratch: the package that the book quotes."""

from miniddp.launch import run_ranks
from miniddp.naive import SimpleDDP
from miniddp.process import get, set_seed

__version__ = "0.1.0"
__all__ = ["SimpleDDP", "get", "run_ranks", "set_seed"]
