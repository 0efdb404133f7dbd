"""The optimizer of a training run and its learning rate in each step."""

import logging

import torch
from torch.optim.lr_scheduler import LambdaLR

from instruments.learning_rate import linear_scaling, warmup
from miniddp.options import Options
from miniddp.process import get

logger = logging.getLogger(__name__)


def build_optimizer(
    module: torch.nn.Module, options: Options
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW, and its learning rate in each step: a warm-up, then the same value to the end."""
    joined_batch = get("ws") * options.batch_size
    start, target = 0.0, options.lr
    if options.scale_lr:
        start = options.lr
        target = linear_scaling(options.lr, options.base_batch_size, joined_batch)
        logger.info("learning rate: %g for a joined batch of %d", target, joined_batch)
    optimizer = torch.optim.AdamW(module.parameters(), lr=target)
    return optimizer, LambdaLR(
        optimizer, lambda step: warmup(step, options.warmup, start, target) / target
    )
