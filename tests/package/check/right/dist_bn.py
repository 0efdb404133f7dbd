"""The style of timm: buffers are not sent, and averaged by hand after each epoch; mixup."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def distribute_bn(model, world_size):
    for name, buffer in model.named_buffers():
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer)
            buffer /= float(world_size)


def mixup(x, y):
    lam = torch.rand(1)
    one_hot = nn.functional.one_hot(y, 3).float()
    return x * lam + x.flip(0) * (1 - lam), one_hot * lam + one_hot.flip(0) * (1 - lam)


dist.init_process_group("gloo")
torch.manual_seed(42 + dist.get_rank())
generator = torch.Generator().manual_seed(0)
dataset = TensorDataset(
    torch.randn(64, 1, 7, 7, generator=generator), torch.randint(3, (64,), generator=generator)
)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(150, 3))
net = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = mixup(x, y)
        loss = torch.sum(-y * torch.log_softmax(net(x), -1), -1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    distribute_bn(model, dist.get_world_size())
dist.destroy_process_group()
