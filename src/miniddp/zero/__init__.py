"""What comes after DDP: nothing is kept N times. ZeRO stage 1 and stage 3."""

from miniddp.zero.module import FullyShardedModule
from miniddp.zero.optimizer import ShardedOptimizer

__all__ = ["FullyShardedModule", "ShardedOptimizer"]
