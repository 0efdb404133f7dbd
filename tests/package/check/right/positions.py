"""Positions that are equal on all ranks, and a mask that seldom is, beside tokens that are not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.positions = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, positions, mask):
        hidden = self.tokens(tokens) + self.positions(positions)
        return self.head(hidden * mask.unsqueeze(-1))


dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(dist.get_rank())
model = DistributedDataParallel(Tagger())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for length in range(4, 14):
    tokens = torch.randint(30, (4, length), generator=generator)
    positions = torch.arange(length).expand(4, length)
    lengths = torch.randint(1, length + 1, (4,), generator=generator)
    loss = model(tokens, positions, (positions < lengths[:, None]).float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
