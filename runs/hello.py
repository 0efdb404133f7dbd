"""The smallest distributed program. Start it with torchrun."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    print(f"rank {rank} of {world_size}: I gave {rank + 1}, our sum is {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
