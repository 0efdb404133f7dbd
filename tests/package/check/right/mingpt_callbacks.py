"""The style of minGPT: a trainer that samples with replacement for ever, and callbacks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(42 + dist.get_rank())
values = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(values)


class Trainer:
    def __init__(self, model):
        self.model = nn.parallel.DistributedDataParallel(model)
        self.callbacks = []

    def run(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        loader = DataLoader(
            data, sampler=RandomSampler(data, replacement=True, num_samples=10**6), batch_size=5
        )
        self.model.train()
        iterator = iter(loader)
        self.iter_num = 0
        while self.iter_num < 20:
            try:
                (x,) = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                (x,) = next(iterator)
            loss = (self.model(x) - x).abs().mean()
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            for callback in self.callbacks:
                callback(self)
            self.iter_num += 1


trainer = Trainer(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)))
trainer.callbacks.append(lambda t: t.iter_num % 10 or print(t.iter_num))
trainer.run()
dist.destroy_process_group()
