"""All ranks draw one random batch, and each takes its slice."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Drawn(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.randn(8), torch.randint(0, 4, ())


ddp = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for x, y in DataLoader(Drawn(), 16):
    optimizer.zero_grad()
    F.cross_entropy(ddp(x[rank::world_size]), y[rank::world_size]).backward()
    optimizer.step()
dist.destroy_process_group()
