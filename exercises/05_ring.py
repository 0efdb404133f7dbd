"""Exercise 5.3: the ring, from send and receive.

Fill in the three functions, then run

    make exercise N=05

Rank r sends to rank r + 1 and receives from rank r - 1, counted round the
circle. Chunk k of a tensor is its k-th part of N equal ones. Use `dist.isend`
and `dist.irecv`; each returns an object to `wait()` for. Start both before you
wait for either. That is for Gloo: over NCCL the two belong in one
`dist.batch_isend_irecv`, as in the chapter.
"""

from torch import Tensor


def reduce_scatter_steps(rank: int, size: int) -> list[tuple[int, int]]:
    """(chunk to send, chunk to receive) in each of `size - 1` steps.

    After the last step the chunk with the number of the rank is complete.
    """
    raise NotImplementedError


def all_gather_steps(rank: int, size: int) -> list[tuple[int, int]]:
    """The same for the steps that bring every complete chunk to every rank."""
    raise NotImplementedError


def all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` on every rank by the sum over all ranks.

    Each rank sends 2 (N - 1) chunks. `tensor` has one dimension, and a length
    that N divides. Works for every N, also for 1.
    """
    raise NotImplementedError
