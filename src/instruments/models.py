"""Models of modules: as the simulator's layers, and equal layers to measure."""

from torch import nn

from instruments.simulator import Layer
from miniddp import set_seed


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
