"""Models: real ones as the simulator's layers, and equal layers to measure."""

import torch
from torch import nn

from finetune.model import build_model
from instruments.simulator import Layer
from miniddp import set_seed


def layers_of_smollm2(size: str, tokens: int, flops_per_second: float) -> list[Layer]:
    """SmolLM2 as a classifier ("135m", "360m"), its layers in the order of forward.

    A weight that multiplies needs 2 operations for each of the `tokens` in forward and
    4 in backward. The embedding is looked up: it multiplies nothing.
    """
    with torch.device("meta"):
        model = build_model(size)
    inner = model.model
    modules = [inner.embed_tokens, *inner.layers, inner.norm, model.score]
    layers = []
    for module in modules:
        parameters = list(module.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        multiplying = 0 if module is inner.embed_tokens else count
        forward = 2 * multiplying * tokens / flops_per_second
        gradient_bytes = [parameter.nbytes for parameter in parameters]
        layers.append(Layer(forward, 2 * forward, gradient_bytes))
    return layers


def layers_by_bytes(module: nn.Module, compute: float) -> list[Layer]:
    """A layer for each tensor of a model that computes for `compute` seconds.

    Compute follows the bytes, a third of it in forward; that of an embedding is none.
    """
    computing = {
        name: 0 if "embeddings" in name else parameter.nbytes
        for name, parameter in module.named_parameters()
    }
    total = sum(computing.values())
    layers = []
    for name, parameter in module.named_parameters():
        share = computing[name] / total
        forward = compute / 3 * share
        backward = compute * 2 / 3 * share
        layers.append(Layer(forward, backward, [parameter.nbytes]))
    return layers


def equal_layers(width: int, count: int) -> nn.Sequential:
    """Square linear layers, each with a ReLU, of equal weights on all ranks.

    Backward makes as many bytes of gradients in every second.
    """
    set_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]
    return nn.Sequential(*layers)
