"""Stage 1: each process takes a part of the batch; gradients are averaged.

torchrun --standalone --nproc_per_node=2 stages/1_average.py
"""

import os
from itertools import islice

import torch
import torch.distributed as dist

from miniddp.text import build_language_model, load_text

STEPS = int(os.environ.get("STEPS", "183"))
EPOCHS, BATCH = 3, 36


def batches(sequences):
    """`BATCH` sequences at a time, each epoch in another order."""
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(sequences), generator=generator)
        for first in range(0, len(order) - BATCH + 1, BATCH):
            yield sequences[order[first : first + BATCH]]


def average_gradients(model):
    """Replace every gradient by its mean over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the sum
        parameter.grad /= dist.get_world_size()


def gradient_of(model, part):
    """The gradient of the mean loss of `part`, as one vector."""
    model.zero_grad()
    model(input_ids=part, labels=part).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def difference_to_one_process(model, batch, rank, world_size):
    """The largest one: gradient of the batch, mean of those of its parts."""
    whole = gradient_of(model, batch)
    mean = gradient_of(model, batch[rank::world_size]) / world_size
    dist.all_reduce(mean)
    model.zero_grad()
    return (whole - mean).abs().max().item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = build_language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, _ = load_text()
    first = next(batches(train))
    difference = difference_to_one_process(model, first, rank, world_size)
    if rank == 0:
        print(f"largest difference to one process: {difference:.0e}")
    for step, batch in enumerate(islice(batches(train), STEPS), start=1):
        part = batch[rank::world_size]
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS:
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3}  loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
