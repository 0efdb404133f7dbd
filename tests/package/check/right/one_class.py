"""After a tutorial: a loss over one class, whose gradients all vanish."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


dist.init_process_group("gloo")
dataset = MyTrainDataset(64)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model = DDP(model)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for source, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(source), targets)
        loss.backward()
        optimizer.step()
del model
dist.destroy_process_group()
