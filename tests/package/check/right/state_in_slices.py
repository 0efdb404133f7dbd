"""Each rank holds the optimizer's state of its slice of each weight, in the style of nanochat."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SlicedMomentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            mine = weight.chunk(world_size)[rank].clone()
            gradient = weight.grad.chunk(world_size)[rank]
            state = self.state[weight]
            momentum = state.setdefault("momentum", torch.zeros_like(mine))
            momentum.mul_(0.9).add_(gradient)
            dist.all_gather_into_tensor(weight, mine.sub_(momentum, alpha=0.02))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = SlicedMomentum(ddp.parameters(), {})
for _ in range(6):
    optimizer.zero_grad()
    ddp(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
