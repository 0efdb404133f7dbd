"""What comes after DDP: nothing is kept N times. ZeRO stage 1 and stage 3."""

from miniddp.fully_sharded import FullyShardedModule
from miniddp.sharded_optimizer import ShardedOptimizer

__all__ = ["FullyShardedModule", "ShardedOptimizer"]
