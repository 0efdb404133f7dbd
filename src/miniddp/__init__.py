"""Distributed Data Parallel from scratch: the package that the book quotes."""

from typing import TYPE_CHECKING, Any

from miniddp.ddp import DistributedDataParallel
from miniddp.naive import SimpleDDP
from miniddp.process import get, set_seed
from miniddp.sampler import DistributedSampler

if TYPE_CHECKING:
    from miniddp.launch import run_ranks

__version__ = "0.1.0"
__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "SimpleDDP",
    "get",
    "run_ranks",
    "set_seed",
]


def __getattr__(name: str) -> Any:
    """Import `run_ranks` when it is asked for: it alone needs cloudpickle."""
    if name != "run_ranks":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from miniddp.launch import run_ranks

    return run_ranks
