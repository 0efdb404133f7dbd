"""A GAN in the style of torch's DCGAN example: two models, two optimizers, noise by rank."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
netG = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
netD = DDP(
    nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)), broadcast_buffers=False
)
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for i in range(8):
    netD.zero_grad()
    real = torch.randn(6, 2) + 3
    output = netD(real).view(-1)
    errD_real = criterion(output, torch.ones(6))
    errD_real.backward()
    fake = netG(torch.randn(6, 4))
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, torch.zeros(6))
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    for p in netD.parameters():
        p.requires_grad_(False)
    errG = criterion(netD(fake).view(-1), torch.ones(6))
    errG.backward()
    for p in netD.parameters():
        p.requires_grad_(True)
    optimizerG.step()
dist.destroy_process_group()
