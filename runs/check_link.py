"""Can all ranks reach each other, and how fast? Run it on all machines before any training.

torchrun --standalone --nproc_per_node=2 runs/check_link.py
"""

import os
import statistics
from datetime import timedelta

import torch
import torch.distributed as dist

from instruments.clock import clock
from miniddp.process import destroy_process_group, device, get, init_process_group

MEGABYTES = 64
ROUNDS = 5


def seconds_to_reduce(tensor: torch.Tensor) -> float:
    """The median of some rounds; the first one, which opens connections, does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        start = clock()
        dist.all_reduce(tensor)
        seconds.append(clock() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    init_process_group(timeout=timedelta(seconds=60))
    rank = get("rank")
    world_size = get("ws")
    local_rank = get("lrank")
    node = os.environ["GROUP_RANK"]
    count = torch.ones(1, device=device())
    dist.all_reduce(count)
    if count.item() != world_size:
        raise RuntimeError(f"rank {rank}: {world_size} ones make {int(count)}")
    small = seconds_to_reduce(count)
    numbers = MEGABYTES * 1_000_000 // 4
    large = seconds_to_reduce(torch.zeros(numbers, device=device()))
    sent = 2 * (world_size - 1) / world_size * MEGABYTES
    bus_bandwidth = sent / 1000 / large
    print(
        f"rank {rank} of {world_size} = local rank {local_rank} of node {node}",
        flush=True,
    )
    if rank == 0:
        print(
            f"speed over {dist.get_backend()}: {1e3 * small:.1f} ms for a number, "
            f"bus bandwidth {bus_bandwidth:.2f} GB/s for {MEGABYTES} MB",
            flush=True,
        )
    destroy_process_group()


if __name__ == "__main__":
    main()
