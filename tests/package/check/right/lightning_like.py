"""A framework in the style of Lightning: modules with hooks, metrics gathered, a progress log."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class System(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        return (self.net(x).argmax(1) == y).float().mean()

    def forward(self, name, *args):
        return getattr(self, name)(*args)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Fit:
    def __init__(self, max_epochs):
        dist.init_process_group("gloo")
        self.max_epochs = max_epochs
        self.logs = []

    def fit(self, system, train, val):
        strategy = DistributedDataParallel(system)
        optimizer = system.configure_optimizers()
        sampler = DistributedSampler(train)
        train = DataLoader(train, batch_size=4, sampler=sampler)
        val = DataLoader(val, batch_size=4, sampler=DistributedSampler(val, shuffle=False))
        for epoch in range(self.max_epochs):
            sampler.set_epoch(epoch)
            strategy.train()
            for index, batch in enumerate(train):
                optimizer.step(closure=lambda: self.closure(strategy, optimizer, batch, index))
            strategy.eval()
            with torch.no_grad():
                scores = [strategy("validation_step", b, i) for i, b in enumerate(val)]
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, torch.stack(scores).mean().item())
            self.logs.append(sum(gathered) / len(gathered))
        dist.destroy_process_group()

    def closure(self, strategy, optimizer, batch, index):
        loss = strategy("training_step", batch, index)
        optimizer.zero_grad()
        loss.backward()
        return loss


torch.manual_seed(2)
inputs = torch.randn(48, 5)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
Fit(2).fit(System(), data, TensorDataset(inputs[:16], (inputs[:16].sum(1) > 0).long()))
