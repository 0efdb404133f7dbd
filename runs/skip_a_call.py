"""Some ranks report the loss, the others do not: all hang, and leave a dump.

torchrun --standalone --nproc_per_node=3 runs/skip_a_call.py build/dumps 0 2
"""

import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace


def train_step() -> None:
    dist.all_reduce(torch.ones(4))


def report_loss() -> None:
    dist.reduce(torch.ones(1), dst=0)


def dump() -> bytes:
    """What NCCL's watchdog writes. (Gloo leaves the name of the group empty.)"""
    kept = pickle.loads(_dump_fr_trace())
    (group,) = kept["pg_config"].values()
    kept["pg_config"] = {"0": {**group, "name": "0", "desc": "default_pg"}}
    return pickle.dumps(kept)


def main(folder: Path, reporting: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    file = folder / f"rank_{rank}"
    file.unlink(missing_ok=True)
    try:
        train_step()
        if rank in reporting:
            report_loss()
        train_step()
    except RuntimeError as error:
        said = str(error).partition("]")[2].strip()
        os.write(1, f"rank {rank}: {said}\n".encode())  # a whole line at once
    file.write_bytes(dump())
    while len(list(folder.glob("rank_*"))) < dist.get_world_size():
        time.sleep(0.1)  # who leaves closes the connections of the others


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(rank) for rank in sys.argv[2:]])
