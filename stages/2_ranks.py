"""Stage 2: the same program on CPUs and on GPUs, a device for each rank.

torchrun --standalone --nproc_per_node=2 stages/2_ranks.py
"""

import os
from itertools import islice

import torch
import torch.distributed as dist

from shakespeare import build_language_model, load_text

STEPS = int(os.environ.get("STEPS", "183"))
EPOCHS, BATCH = 3, 36


def start():
    """Join the group that torchrun describes; this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return device
    dist.init_process_group("nccl", device_id=device)
    return device


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


def report(step, loss):
    """Print the mean of the ranks' losses, once."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step:3}  loss {mean.item():.4f}", flush=True)


def main():
    device = start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = build_language_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, _ = load_text()
    for step, batch in enumerate(islice(batches(train), STEPS), start=1):
        part = batch[rank::world_size].to(device)
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
