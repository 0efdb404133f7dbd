"""`fully_shard`: layers, 16 bits, accumulation and clipping.

torchrun --standalone --nproc_per_node=2 runs/pytorch/15_after.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model, dtype=torch.bfloat16):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model, optimizer, micro_batches):
    for i, (inputs, targets) in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(i == len(micro_batches))
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        (loss / len(micro_batches)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor().item()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return self.head(inputs)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(3)]
    mine = slice(dist.get_rank(), None, 2)  # two of four samples
    parts = [(inputs[mine], targets[mine]) for inputs, targets in batches]
    alone = Model()
    model = copy.deepcopy(alone)
    in_16_bits = copy.deepcopy(alone)
    if dist.get_rank() == 1:
        nn.init.zeros_(model.head.weight)  # what rank 0 does not have

    inputs, targets = map(torch.cat, zip(*batches, strict=True))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    sharded_optimizer = shard(model, torch.float32)
    for _ in range(3):
        nn.functional.mse_loss(alone(inputs), targets).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        sharded_norm = train_step(model, sharded_optimizer, parts)
        torch.testing.assert_close(sharded_norm, norm.item())
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    torch.testing.assert_close(weights, list(alone.parameters()))

    optimizer = shard(in_16_bits)
    assert in_16_bits(parts[0][0]).dtype == torch.bfloat16
    train_step(in_16_bits, optimizer, parts)
    weight = in_16_bits.head.weight
    assert weight.dtype == optimizer.state[weight]["exp_avg"].dtype == torch.float32
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
