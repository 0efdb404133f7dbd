"""A frozen backbone in eval mode, a head, groups of parameters, two loaders in turn."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.neck = nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.neck(self.backbone(x)))


dist.init_process_group("gloo")
torch.manual_seed(0)
labelled = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
others = TensorDataset(torch.randn(64, 6))
first = DistributedSampler(labelled)
second = DistributedSampler(others, seed=5)
model = nn.parallel.DistributedDataParallel(Classifier())
optimizer = torch.optim.AdamW(
    [
        {"params": model.module.neck.parameters(), "lr": 1e-4},
        {"params": model.module.head.parameters(), "lr": 1e-3},
    ]
)
for epoch in range(3):
    first.set_epoch(epoch)
    second.set_epoch(epoch)
    model.train()
    loader = DataLoader(labelled, 4, sampler=first)
    unlabelled = DataLoader(others, 4, sampler=second)
    for (x, y), (u,) in zip(itertools.cycle(loader), unlabelled, strict=False):
        optimizer.zero_grad()
        out = model(torch.cat([x, u]))
        loss = nn.functional.cross_entropy(out[: len(x)], y)
        loss = loss - 0.1 * out[len(x) :].log_softmax(1).mean()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
