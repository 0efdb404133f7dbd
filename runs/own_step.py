"""How fast a DDP step computes, and a trace of it. Start it with torchrun."""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group, or this holds it for ever
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule, tensorboard_trace_handler

PEAK = 67e12  # FLOP/s by your GPU's data sheet: an H100 in float32

on_gpu = torch.cuda.is_available()


def seconds_of(work: Callable[[], object]) -> float:
    """One call, on average of 20, after five that are left out."""
    for number in range(25):
        if number == 5:
            start = now()
        work()
    return (now() - start) / 20


def now() -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    module = nn.Sequential(
        nn.Linear(1024, 1024),
        nn.GELU(),
        nn.Linear(1024, 1024),
    )
    model = DistributedDataParallel(module.to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.rand(512, 1024, device=device, requires_grad=True)

    def train_step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    size = 8192 if on_gpu else 1024
    matrix = torch.rand(size, size, device=device)
    product = 2 * size**3 / seconds_of(lambda: matrix @ matrix)
    step = seconds_of(train_step)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    reached = 6 * parameters * len(tokens) / step
    if dist.get_rank() == 0:
        print(f"{1e3 * step:.1f} ms a step")
        print(f"{reached / product:.0%} of what a large matrix product reaches")
        if on_gpu:
            print(f"{reached / PEAK:.0%} of the data sheet: the MFU")

    with profile(
        schedule=schedule(wait=1, warmup=2, active=5),
        on_trace_ready=tensorboard_trace_handler("traces", use_gzip=True),
    ) as profiler:
        for _ in range(8):
            train_step()
            profiler.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # the wrapper is gone: it has held the group
