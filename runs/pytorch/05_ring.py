"""An all-reduce is a reduce-scatter and an all-gather.

torchrun --standalone --nproc_per_node=2 runs/pytorch/05_ring.py
"""

import torch
import torch.distributed as dist


def all_reduce_in_two(tensor):
    """Both halves of the ring; the ranks must divide the tensor's length."""
    chunk = tensor.new_empty(len(tensor) // dist.get_world_size())
    dist.reduce_scatter_single(chunk, tensor)  # this rank's chunk of the sum
    dist.all_gather_single(tensor, chunk)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(8)
    expected = tensor.clone()
    dist.all_reduce(expected)
    all_reduce_in_two(tensor)
    torch.testing.assert_close(tensor, expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
