"""The ring all-reduce in ten lines, and torch's calls for its two halves.

torchrun --standalone --nproc_per_node=2 runs/pytorch/05_ring.py
"""

import torch
import torch.distributed as dist


def exchange(outgoing, incoming):
    """Send to the right and, at the same time, receive from the left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    to_right = dist.P2POp(dist.isend, outgoing, (rank + 1) % size)
    from_left = dist.P2POp(dist.irecv, incoming, (rank - 1) % size)
    for work in dist.batch_isend_irecv([to_right, from_left]):
        work.wait()


def ring_all_reduce(tensor):
    """Replace `tensor` by the sum over all ranks; they divide its length."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(size, -1)
    arrived = torch.empty_like(chunks[0])
    for step in range(size - 1):
        exchange(chunks[(rank - step - 1) % size], arrived)
        chunks[(rank - step - 2) % size] += arrived
    for step in range(size - 1):
        exchange(chunks[(rank - step) % size], chunks[(rank - step - 1) % size])


def all_reduce_in_two(tensor):
    """Both halves of the ring; the ranks must divide the tensor's length."""
    chunk = tensor.new_empty(len(tensor) // dist.get_world_size())
    dist.reduce_scatter_single(chunk, tensor)  # this rank's chunk of the sum
    dist.all_gather_single(tensor, chunk)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    numbers = torch.randn(12)
    expected = numbers.clone()
    dist.all_reduce(expected)
    for all_reduce in ring_all_reduce, all_reduce_in_two:
        tensor = numbers.clone()
        all_reduce(tensor)
        torch.testing.assert_close(tensor, expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
