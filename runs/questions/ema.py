"""A moving average of the weights: of ddp.module, after each step.

torchrun --standalone --nproc_per_node=2 runs/questions/ema.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ddp = DistributedDataParallel(nn.Linear(4, 1))
average = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(3):
    ddp(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(ddp.module)

averages = [torch.empty(1, 4) for _ in range(2)]
dist.all_gather(averages, average.module.weight.detach())
assert torch.equal(averages[0], averages[1])  # equal weights, equal averages
if dist.get_rank() == 0:
    torch.save(average.module.state_dict(), "/dev/null")  # one rank saves
del ddp
dist.destroy_process_group()
