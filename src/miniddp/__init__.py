"""Distributed Data Parallel from scratch: the package that the book quotes."""

from miniddp.ddp import DistributedDataParallel
from miniddp.launch import run_ranks
from miniddp.naive import SimpleDDP
from miniddp.process import get, set_seed
from miniddp.replicate import verify_replicas
from miniddp.sampler import DistributedSampler, check_equal_steps

__version__ = "0.1.0"
__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "SimpleDDP",
    "check_equal_steps",
    "get",
    "run_ranks",
    "set_seed",
    "verify_replicas",
]
