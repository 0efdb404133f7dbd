"""Evaluation of the module on rank 0 only, a barrier, early stopping by broadcast."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(0)
x = torch.randn(80, 5, generator=generator)
everything = TensorDataset(x, x.sum(1, keepdim=True))
train_set, val_set = random_split(everything, [64, 16], generator=generator)
sampler = DistributedSampler(train_set, shuffle=True)
train_loader = DataLoader(train_set, batch_size=8, sampler=sampler, drop_last=True)
val_loader = DataLoader(val_set, batch_size=8)
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
best, patience = float("inf"), 2
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.smooth_l1_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    verdict = torch.zeros(2)
    if rank == 0:
        model.module.eval()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model.module(a), b).item() for a, b in val_loader]
        mean = sum(losses) / len(losses)
        patience = 2 if mean < best else patience - 1
        best = min(best, mean)
        verdict = torch.tensor([float(patience == 0), mean])
    dist.broadcast(verdict, src=0)
    scheduler.step(verdict[1].item())
    if verdict[0]:
        break
dist.barrier()
dist.destroy_process_group()
