"""Stage 7: gradients leave in buckets, during backward: this is DDP.

torchrun --standalone --nproc_per_node=2 stages/7_ddp.py
"""

import os
from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from miniddp import DistributedDataParallel, DistributedSampler
from miniddp.process import destroy_process_group, device, init_process_group
from miniddp.replicate import verify_replicas
from miniddp.sampler import shard
from shakespeare import build_language_model, load_text

STEPS = int(os.environ.get("STEPS", "183"))
EPOCHS, BATCH = 3, 36


def batches(sequences):
    """This rank's part of each batch, each epoch in another order."""
    sampler = DistributedSampler(sequences, drop_last=True)
    size = BATCH // dist.get_world_size()
    loader = DataLoader(sequences, size, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def report(step, loss):
    """Print the mean of the ranks' losses, once."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step:3}  loss {mean.item():.4f}", flush=True)


@torch.no_grad()
def evaluate(model, sequences):
    """Print the mean loss over all sequences, whatever the number of ranks."""
    model.eval()
    positions = shard(len(sequences), dist.get_world_size(), dist.get_rank())
    total = torch.zeros((), device=device())
    for part in DataLoader(sequences, BATCH, sampler=positions):
        part = part.to(device())
        total += model(input_ids=part, labels=part).loss * len(part)
    model.train()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"held-out loss {total.item() / len(sequences):.4f}")


def main():
    init_process_group()
    torch.manual_seed(dist.get_rank())  # each rank draws numbers of its own
    model = build_language_model().to(device())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = load_text()
    for step, part in enumerate(islice(batches(train), STEPS), start=1):
        part = part.to(device())
        loss = ddp(input_ids=part, labels=part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS:
            report(step, loss)
    verify_replicas(model)
    evaluate(model, test)
    del ddp  # torch's class in its place would hold the group
    destroy_process_group()


if __name__ == "__main__":
    main()
