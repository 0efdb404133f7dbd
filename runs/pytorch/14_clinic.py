"""A wrong result: are the replicas equal, and are their gradients?

torchrun --standalone --nproc_per_node=2 runs/pytorch/14_clinic.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def spread(tensor):
    """How far the ranks are apart, in the element where it is most."""
    lowest = tensor.detach().clone()
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return (highest - lowest).max().item()


def report(model):
    """A line for each parameter: the spread of its values and gradients."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:  # on this rank, but every rank has to answer
            gradient = torch.zeros_like(parameter)
        weights = spread(parameter)
        gradients = spread(gradient)
        if dist.get_rank() == 0:
            print(f"{name:20} weights {weights:.0e}  gradients {gradients:.0e}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    ddp = DistributedDataParallel(model)
    inputs = torch.full((2, 3), 1.0 + dist.get_rank())

    ddp(inputs).sum().backward()
    report(model)
    assert spread(model.weight) == spread(model.weight.grad) == 0

    model.zero_grad()
    model(inputs).sum().backward()  # past the wrapper: case 8
    report(model)
    assert spread(model.weight) == 0
    assert spread(model.weight.grad) == 2.0  # of 2 samples: 2 and 4
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
