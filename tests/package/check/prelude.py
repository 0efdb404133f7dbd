# ruff: noqa: F401
import contextlib
import itertools
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=4))
rank = dist.get_rank()
world_size = dist.get_world_size()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def mine(count=6):
    """Batches of this rank's own."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


# The program:
