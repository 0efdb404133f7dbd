"""The style of torch's first tutorial, where each rank takes a slice of one batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


dist.init_process_group("gloo")
torch.manual_seed(1234)
dataset = TensorDataset(torch.randn(64, 6), torch.randint(0, 2, (64,)))
net = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
bsz = 8 // dist.get_world_size()
begin = dist.get_rank() * bsz
for _ in range(2):
    for data, target in DataLoader(dataset, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        output = F.log_softmax(net(data[begin : begin + bsz]), dim=1)
        F.nll_loss(output, target[begin : begin + bsz]).backward()
        average_gradients(net)
        optimizer.step()
dist.destroy_process_group()
