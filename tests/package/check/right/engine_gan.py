"""A GAN whose passes all go through one line of an engine, as with Fabric."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Engine:
    def __init__(self):
        dist.init_process_group("gloo")

    def backward(self, loss):
        loss.backward()


engine = Engine()
torch.manual_seed(5)
D = DDP(nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
G = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
opt_d = torch.optim.Adam(D.parameters(), 2e-3, betas=(0.5, 0.999))
opt_g = torch.optim.Adam(G.parameters(), 2e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
torch.manual_seed(100 + dist.get_rank())
for _ in range(6):
    opt_d.zero_grad()
    engine.backward(criterion(D(torch.randn(16, 4) * 2 + 1), torch.ones(16, 1)))
    fake = G(torch.randn(16, 8))
    engine.backward(criterion(D(fake.detach()), torch.zeros(16, 1)))
    opt_d.step()
    opt_g.zero_grad()
    for p in D.parameters():
        p.requires_grad_(False)
    engine.backward(criterion(D(fake), torch.ones(16, 1)))
    for p in D.parameters():
        p.requires_grad_(True)
    opt_g.step()
del D, G
dist.destroy_process_group()
