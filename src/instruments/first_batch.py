"""The gradient of a stage's first batch: of ranks that average, and of one process."""

import runpy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy


def gradients(
    rank: int, stage: str, dtype: torch.dtype = torch.float32, weighted: bool = False
) -> tuple[Tensor, Tensor]:
    """The mean of the ranks' gradients and that of the whole batch, as one vector each.

    `stage` is the path of a program that has the functions of stage 1. With `weighted`
    each rank counts by its part of the batch.
    """
    functions = runpy.run_path(stage)
    torch.manual_seed(0)
    model = functions["build_language_model"]().to(dtype)
    sequences, _ = functions["load_text"]()
    batch = next(functions["batches"](sequences))
    part = batch[rank :: dist.get_world_size()]
    weight = len(part) / len(batch) if weighted else 1 / dist.get_world_size()
    mean = functions["gradient_of"](model, part) * weight
    dist.all_reduce(mean)
    return mean, functions["gradient_of"](model, batch)


def gradients_all_in_float64(rank: int, stage: str) -> tuple[Tensor, Tensor]:
    """The same in float64, the model's norms and its loss too.

    By themselves these compute in float32, whatever the dtype of the weights.
    """
    from transformers.models.llama import modeling_llama

    llama: Any = modeling_llama

    def norm(self: Any, hidden: Tensor) -> Tensor:
        variance = hidden.square().mean(-1, keepdim=True)
        scale = (variance + self.variance_epsilon).rsqrt()
        normed: Tensor = self.weight * hidden * scale
        return normed

    def loss(logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    llama.LlamaRMSNorm.forward = norm
    llama.LlamaForCausalLM.loss_function = staticmethod(loss)
    return gradients(rank, stage, torch.float64)
