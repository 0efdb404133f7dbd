"""Distributed Data Parallel, built from scratch: the package that the book quotes."""

__version__ = "0.1.0"
