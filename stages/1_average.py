"""Stage 1: each process takes a part of the batch; gradients are averaged.

torchrun --standalone --nproc_per_node=2 stages/1_average.py
"""

import copy
import os
from itertools import islice

import torch
import torch.distributed as dist

from shakespeare import build_language_model, load_text

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
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def gradient_of(model, part):
    """The gradient of the mean loss of `part`, as one vector."""
    loss = model(input_ids=part, labels=part).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def compare_with_one_process(model, batch):
    """How far the mean of the parts' gradients is from the batch's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(model).to(dtype)
        whole = gradient_of(model, batch)
        mean = gradient_of(model, batch[rank::world_size]) / world_size
        dist.all_reduce(mean)
        if rank == 0:
            difference = (whole - mean).abs().max()
            print(f"off by {difference:.0e} at most in {dtype}", flush=True)


def report(step, loss):
    """Print the mean of the ranks' losses, once."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step:3}  loss {mean.item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = build_language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, _ = load_text()
    compare_with_one_process(model, next(batches(train)))
    for step, batch in enumerate(islice(batches(train), STEPS), start=1):
        part = batch[rank::world_size]
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS:
            report(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
