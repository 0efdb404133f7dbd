"""The same program without a launcher."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank: int, size: int, store: str) -> None:
    url = f"file://{store}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    print(f"rank {rank} of {size}: I gave {rank + 1}, our sum is {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, args=(2, f"{folder}/store"), nprocs=2)
