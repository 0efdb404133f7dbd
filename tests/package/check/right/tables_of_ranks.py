"""Embedding tables of each rank's own, for all ranks' samples, as in DLRM."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)


top = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
torch.manual_seed(rank)
table = nn.Embedding(50, 8, sparse=True)
optimizers = [torch.optim.SGD(table.parameters(), 0.1), torch.optim.SGD(top.parameters(), 0.1)]
torch.manual_seed(1)
for _ in range(12):
    ids = torch.randint(0, 50, (world_size, 8 * world_size))
    targets = torch.randint(0, 4, (8 * world_size,))[rank * 8 : rank * 8 + 8]
    rows = Exchange.apply(table(ids[rank])).view(world_size, 8, 8)
    loss = F.cross_entropy(top(rows.transpose(0, 1).reshape(8, -1)), targets)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
dist.destroy_process_group()
