"""All ranks read the same batches, and each takes its slice: of the samples, of the sequence."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for inputs, targets in DataLoader(dataset, batch_size=16, shuffle=True):
    x, y = inputs.chunk(size)[rank], targets.chunk(size)[rank]
    optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()

tokens = TensorDataset(torch.randint(0, 12, (40, 16)))
model = DDP(nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
length = 16 // size
for (batch,) in DataLoader(tokens, batch_size=4, shuffle=True):
    part = batch[:, rank * length : (rank + 1) * length]
    logits = model(part[:, :-1])
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
    optimizer.step()
del model
dist.destroy_process_group()
