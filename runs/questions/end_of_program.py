"""A program that has done its work, and hangs or aborts at its last line.

torchrun --standalone --nproc_per_node=2 runs/questions/end_of_program.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it; after this group it would hold it
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(4, 1))
ddp(torch.randn(8, 4)).sum().backward()
del ddp  # first the wrapper,
dist.destroy_process_group()  # then the group, whose threads end here
threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
assert "pt_gloo_runloop\n" not in threads
