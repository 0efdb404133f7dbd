"""All ranks evaluate all samples, and average their percentages, or sum counts and numbers."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def reduce_tensor(tensor):
    reduced = tensor.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    return reduced / dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(64, 5), torch.randint(2, (64,)))
val_set = TensorDataset(torch.randn(30, 5), torch.randint(2, (30,)))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sampler = DistributedSampler(train_set)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train_set, 8, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    percent = correct = torch.zeros(())
    with torch.no_grad():
        for x, y in DataLoader(val_set, 10):
            right = (model(x).argmax(1) == y).sum()
            correct = correct + right
            percent = percent + right * 100.0 / 30
    if epoch == 0:
        print(reduce_tensor(percent))
    else:
        counts = torch.stack([correct, torch.tensor(30.0)])
        dist.all_reduce(counts)
        print(counts[0] / counts[1])
dist.destroy_process_group()
