"""A sampler in ten lines, torch's, and join(), with which a rank ends early.

torchrun --standalone --nproc_per_node=2 runs/pytorch/03_sharding.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class EqualShards:
    """This rank's part of one shuffle, as long as that of any other rank."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.dataset) // dist.get_world_size()

    def __iter__(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        total = len(self) * size
        return iter(order[rank:total:size])


def train(ddp, optimizer, dataset, epochs):
    sampler = DistributedSampler(dataset)  # in the place of shuffle=True
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # else each epoch has the same order
        for batch in loader:
            ddp(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def train_uneven(ddp, optimizer, loader):
    with ddp.join():  # who has no batch left answers the others' calls
        for batch in loader:
            ddp(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class Seen(nn.Module):
    """A model of one weight that remembers what it has seen."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def forward(self, batch):
        self.seen += batch.tolist()
        return self.weight * batch


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(Seen())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)

    ours = EqualShards(range(11))
    torchs = DistributedSampler(range(11), drop_last=True)
    for epoch in range(3):
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs) == 11 // size

    train(ddp, optimizer, torch.arange(4.0 * size), epochs=2)
    seen = [None] * size
    dist.all_gather_object(seen, ddp.module.seen)
    for epoch in slice(0, 4), slice(4, 8):
        of_all = [sample for of_rank in seen for sample in of_rank[epoch]]
        assert sorted(of_all) == list(range(4 * size))
    assert seen[0][:4] != seen[0][4:]

    nn.init.zeros_(ddp.module.weight)
    train_uneven(ddp, optimizer, [torch.ones(1)] * (1 + rank))
    steps = torch.arange(size, 0, -1) / size  # 1, then a half
    assert torch.isclose(ddp.module.weight, -steps.sum())
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
