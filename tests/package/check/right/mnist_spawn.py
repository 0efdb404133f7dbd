"""Ranks of its own, by torch.multiprocessing; the style of the DDP tutorial."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


def demo_basic(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    ddp_model = DDP(ToyModel())
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        nn.MSELoss()(outputs, torch.randn(20, 5)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    mp.start_processes(demo_basic, args=(2, free_port()), nprocs=2, start_method="fork")
