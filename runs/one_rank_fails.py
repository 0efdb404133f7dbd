"""Rank 1 raises; the others wait for it in an all-reduce.

torchrun --standalone --nproc_per_node=2 runs/one_rank_fails.py
"""

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from miniddp.process import get, init_process_group


@record
def main() -> None:
    init_process_group("gloo")
    print(f"rank {get('rank')} starts", flush=True)
    dist.barrier()
    if get("rank") == 1:
        raise ValueError("row 4711 of the data has no label")
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
