"""Predictions of a padded evaluation, gathered, and cut to the length of the dataset."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
test_set = TensorDataset(torch.randn(33, 4), torch.randint(0, 2, (33,)))
train_loader = DataLoader(train_set, 8, sampler=DistributedSampler(train_set))
test_loader = DataLoader(test_set, 5, sampler=DistributedSampler(test_set, shuffle=False))
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    train_loader.sampler.set_epoch(epoch)
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    with torch.no_grad():
        hits = torch.cat([model(x).argmax(1) == y for x, y in test_loader])
    gathered = [torch.empty_like(hits) for _ in range(size)]
    dist.all_gather(gathered, hits)
    print(torch.stack(gathered, dim=1).flatten()[: len(test_set)].float().mean())
del model
dist.destroy_process_group()
