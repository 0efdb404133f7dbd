"""Micro-batches within no_sync, the loss divided, a remainder at the end of the epoch."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(5)
dataset = TensorDataset(torch.randn(56, 3), torch.randn(56))
sampler = DistributedSampler(dataset, seed=11)
loader = DataLoader(dataset, sampler=sampler, batch_size=4)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.Adam(model.parameters())
ACCUM = 3
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        step_now = (i + 1) % ACCUM == 0 or i + 1 == len(loader)
        with nullcontext() if step_now else model.no_sync():
            loss = nn.functional.mse_loss(model(x).squeeze(1), y) / ACCUM
            loss.backward()
        if step_now:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
