"""The style of torch's ImageNet example: functions, meters, padded evaluation made exact."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Subset


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()


def train(loader, model, criterion, optimizer, epoch):
    losses = AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0 and dist.get_rank() == 0:
            print(epoch, i, losses.sum, time.time() - end)


def validate(loader, model, criterion, args_world_size):
    losses = AverageMeter()

    def run_validate(loader):
        with torch.no_grad():
            for images, target in loader:
                losses.update(criterion(model(images), target).item(), images.size(0))

    model.eval()
    run_validate(loader)
    losses.all_reduce()
    done = len(loader.sampler) * args_world_size
    if done < len(loader.dataset):
        rest = Subset(loader.dataset, range(done, len(loader.dataset)))
        run_validate(torch.utils.data.DataLoader(rest, batch_size=4))
    return losses.sum / losses.count


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank = int(os.environ["RANK"])
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(37, 3, 8, 8, generator=generator)
    labels = torch.randint(5, (37,), generator=generator)
    data = torch.utils.data.TensorDataset(images, labels)
    train_sampler = torch.utils.data.distributed.DistributedSampler(data)
    val_sampler = torch.utils.data.distributed.DistributedSampler(
        data, shuffle=False, drop_last=True
    )
    train_loader = torch.utils.data.DataLoader(
        data, batch_size=4, shuffle=(train_sampler is None), num_workers=1, sampler=train_sampler
    )
    val_loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=val_sampler)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch)
        loss = validate(val_loader, model, criterion, dist.get_world_size())
        scheduler.step()
        if rank == 0:
            print(loss)
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict()}, os.devnull)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
