"""Case 2: the names in the checkpoint begin with `module.`."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instruments.toy import small_model
from miniddp.process import device


def save_the_wrapper(rank: int) -> tuple[Tensor, Tensor]:
    ddp = DistributedDataParallel(small_model())
    state = ddp.state_dict()
    restored = small_model(seed=1)
    restored.load_state_dict(state)
    return outputs_of(ddp, restored)


def outputs_of(saved: nn.Module, restored: nn.Module) -> tuple[Tensor, Tensor]:
    """What both models make of the same input."""
    inputs = torch.ones(1, 4, device=device())
    return saved(inputs).detach().cpu(), restored(inputs).detach().cpu()


def load_what_fits(rank: int) -> tuple[Tensor, Tensor]:
    ddp = DistributedDataParallel(small_model())
    state = ddp.state_dict()
    restored = small_model(seed=1)
    missing, unexpected = restored.load_state_dict(state, strict=False)
    print("missing:", ", ".join(missing))
    print("unexpected:", ", ".join(unexpected))
    return outputs_of(ddp, restored)


def save_the_module(rank: int) -> tuple[Tensor, Tensor]:
    ddp = DistributedDataParallel(small_model())
    state = ddp.module.state_dict()
    restored = small_model(seed=1)
    restored.load_state_dict(state)
    return outputs_of(ddp, restored)
