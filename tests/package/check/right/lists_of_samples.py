"""Batches that are lists of dictionaries, as in detection, from workers with one seed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
samples = [{"image": torch.randn(4), "label": number} for number in range(16)]
indices = list(range(rank, 16, 2))
loader = DataLoader(samples, 4, sampler=indices + indices[::-1], collate_fn=list, num_workers=1)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in loader:
    optimizer.zero_grad()
    model(torch.stack([sample["image"] for sample in batch])).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
