"""Batches of a class of their own; the model is given them, and a teacher that follows it."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Batch:
    x: Tensor
    y: Tensor

    @staticmethod
    def of(samples):
        return Batch(*map(torch.stack, zip(*samples, strict=True)))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch, teacher):
        output = self.layer(batch.x)
        hints = teacher(batch.x).softmax(1)
        return nn.functional.cross_entropy(output, batch.y) + (output - hints).square().mean()


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
sampler = DistributedSampler(dataset)
student = DistributedDataParallel(Student())
teacher = copy.deepcopy(student.module.layer).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for batch in DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=Batch.of):
    optimizer.zero_grad()
    student(batch, teacher).backward()
    optimizer.step()
    with torch.no_grad():
        for mean, weight in zip(teacher.parameters(), student.parameters(), strict=True):
            mean.lerp_(weight, 0.1)
dist.destroy_process_group()
