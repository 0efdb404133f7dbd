"""Distributed Data Parallel: a wrapper and its reducer."""

from miniddp.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
