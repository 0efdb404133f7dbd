"""A last layer whose classes are the ranks' own, in the style of InsightFace's partial FC."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AllGather(Function):
    @staticmethod
    def forward(ctx, mine):
        parts = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(parts, mine)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(world_size)[rank] * world_size


class CrossEntropy(Function):
    """Of logits of which each rank has those of its own classes."""

    @staticmethod
    def forward(ctx, logits, labels):
        exponents = logits.exp()
        total = exponents.sum(1, keepdim=True)
        dist.all_reduce(total)
        shares = exponents / total
        mine = nn.functional.one_hot(labels, CLASSES)[:, rank::world_size]
        chosen = (shares * mine).sum(1)
        dist.all_reduce(chosen)
        ctx.save_for_backward(shares - mine)
        return -chosen.log().mean()

    @staticmethod
    def backward(ctx, gradient):
        (difference,) = ctx.saved_tensors
        return gradient * difference / len(difference), None


CLASSES = 10
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, CLASSES, (64,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
backbone = DistributedDataParallel(nn.Linear(8, 6))
torch.manual_seed(1 + rank)
weight = nn.Parameter(torch.randn(CLASSES // world_size, 6) / 10)
groups = [{"params": backbone.parameters()}, {"params": [weight]}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        labels = [torch.empty_like(y) for _ in range(world_size)]
        dist.all_gather(labels, y)
        logits = AllGather.apply(backbone(x)) @ weight.T
        optimizer.zero_grad()
        CrossEntropy.apply(logits, torch.cat(labels)).backward()
        optimizer.step()
dist.destroy_process_group()
