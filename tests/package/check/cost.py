"""What watching costs of a step: `python -m tests.package.check.cost`.

Two ranks over gloo. Blocks of five steps are watched and left alone in turn.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from miniddp.check import session
from miniddp.launch import run_ranks

SIZES = [(512, 64, 8), (1024, 32, 6), (256, 64, 50)]
"""Width, batch and number of layers."""


def medians(rank: int, width: int, batch: int, layers: int) -> tuple[float, float]:
    """Seconds of a step, watched and not."""
    watched = session.start(session.Options(None, None, True, "/dev/null"))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    modules = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(*modules))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    inputs = torch.randn(batch, width) + rank
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step in range(120):
        is_watched = step // 5 % 2 == 0
        watched.recorder.is_watching = is_watched
        begin = time.perf_counter()
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
        seconds[is_watched].append(time.perf_counter() - begin)
    return statistics.median(seconds[True][10:]), statistics.median(seconds[False][10:])


if __name__ == "__main__":
    for size in SIZES:
        watched, alone = run_ranks(medians, 2, *size, backend=None, timeout=300)[0]
        print(f"{size}: {alone * 1e3:.1f} ms, watched {watched / alone:.2f} times")
