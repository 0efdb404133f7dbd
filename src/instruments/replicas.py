"""How the ranks' values differ. Every rank calls these functions: they are collectives."""

import torch.distributed as dist
from torch import Tensor, nn

from miniddp.replicate import verify_replicas


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of the ranks' values, which keep what they hold."""
    mean = value.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def weights(model: nn.Module) -> Tensor:
    """All parameters, one after the other, on the CPU."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def spread(model: nn.Module) -> float:
    """The largest difference of any weight between any two ranks."""
    return max(spread_of(parameter) for parameter in model.parameters())


def spread_of(tensor: Tensor) -> float:
    """The largest difference of any element between any two ranks."""
    low = tensor.detach().clone()
    high = tensor.detach().clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return (high - low).max().item()


def compare_gradients(model: nn.Module) -> None:
    """Says of each parameter whether all ranks hold the same gradient."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        equal = spread_of(parameter.grad) == 0
        print(f"{name:9}", "same" if equal else "DIFFERENT")


def report(model: nn.Module) -> None:
    """Says whether all ranks hold the same weights, and which differ first."""
    try:
        verify_replicas(model)
        print("replicas identical")
    except ValueError as error:
        print(str(error).partition(" (")[0])
