"""Save and load a model that `fully_shard` has sharded. Every rank calls these functions."""

from typing import Any

import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer


def gather_whole(model: nn.Module) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def save_parts(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load_parts(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    parts = {"model": weights, "optimizer": state}
    checkpoint.load(parts, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
    )
