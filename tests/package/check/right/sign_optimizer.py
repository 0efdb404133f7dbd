"""An optimizer that talks: the majority of the signs, in one buffer, inside its step."""

import torch
import torch.distributed as dist
from torch import nn


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            signs = torch.cat([p.grad.flatten() for p in params]).sign()
            dist.all_reduce(signs)
            for p, sign in zip(params, signs.sign().split([p.numel() for p in params])):
                p.sub_(sign.view_as(p), alpha=group["lr"])


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = SignSGD(model.parameters(), 1e-2)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(12):
    x = torch.randn(8, 4, generator=generator)
    optimizer.zero_grad()
    (model(x) - x.prod(1, keepdim=True)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
