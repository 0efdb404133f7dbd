"""All-reduce as a ring, built from nothing but send and receive.

Each rank sends to its right and receives from its left, 2 (N - 1) / N times the
tensor's bytes: the least possible (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009).

The functions take the arguments of their namesakes in `torch.distributed` and
return the bytes that this rank sent. `op` is SUM or AVG, which divides first:
for integers a `RuntimeError`. `ValueError` says that a rank's tensors differ in
shape, dtype or device, or that it is not in `group`.

With Gloo a function returns when its result is there; if a neighbour is lost,
a `RuntimeError` names both. With NCCL it returns when all is queued. NCCL works
on a stream of its own, and each `wait` makes the current stream wait for that
one (ProcessGroupNCCL.cpp, synchronizeStream): what you queue later sees the
result. Of a lost neighbour Python learns nothing: torch's watchdog ends the
process.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from miniddp.process import Group

Op = ReduceOp.RedOpType
SUM = ReduceOp.SUM
AVG = ReduceOp.AVG

SEGMENT_BYTES = 16 * 2**20
"""The longest message that is added: a larger chunk comes in several."""


class Ring:
    """The circle as one rank sees it: all numbers count within `group`."""

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group")
        self.size = dist.get_world_size(group)
        self.left = (self.rank - 1) % self.size
        self.right = (self.rank + 1) % self.size
        self.sent = 0  # bytes


def exchange(outgoing: Tensor, incoming: Tensor, ring: Ring) -> None:
    """Send to the right and, at the same time, receive from the left.

    In one batch, which NCCL runs as one operation. Alone each would wait for
    the one before it: all ranks would receive, and none would send.
    """
    from_left = dist.P2POp(
        dist.irecv, incoming, group=ring.group, group_peer=ring.left
    )
    to_right = dist.P2POp(
        dist.isend, outgoing, group=ring.group, group_peer=ring.right
    )
    filled = [op for op in (from_left, to_right) if op.tensor.numel() > 0]
    try:
        works = dist.batch_isend_irecv(filled) if filled else []
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"the ring is broken: rank {ring.rank} of {ring.size} could not "
            f"receive from rank {ring.left} or send to {ring.right}: {error}"
        ) from error
    ring.sent += outgoing.nbytes


def reduce_scatter_steps(rank: int, size: int) -> list[tuple[int, int]]:
    """What to send and to receive, step by step: `rank` is received last."""
    steps = range(size - 1)
    return [((rank - s - 1) % size, (rank - s - 2) % size) for s in steps]


def reduce_scatter_phase(chunks: Sequence[Tensor], ring: Ring) -> None:
    """Complete chunk number `rank` on each rank; the others stay unfinished."""
    count = 1 + chunks[0].nbytes // SEGMENT_BYTES  # chunk 0 is the longest
    buffer = torch.empty_like(chunks[0].tensor_split(count)[0])
    for send, receive in reduce_scatter_steps(ring.rank, ring.size):
        outgoing = chunks[send].tensor_split(count)
        sums = chunks[receive].tensor_split(count)
        for segment, partial_sum in zip(outgoing, sums, strict=True):
            arrived = buffer[: len(partial_sum)]
            exchange(segment, arrived, ring)
            partial_sum += arrived


def all_gather_steps(rank: int, size: int) -> list[tuple[int, int]]:
    """What to send and to receive, step by step: `rank` is sent first."""
    return [((rank - s) % size, (rank - s - 1) % size) for s in range(size - 1)]


def all_gather_phase(chunks: Sequence[Tensor], ring: Ring) -> None:
    """Copy chunk number r, which rank r has complete, to all ranks."""
    for send, receive in all_gather_steps(ring.rank, ring.size):
        exchange(chunks[send], chunks[receive], ring)


def all_reduce(tensor: Tensor, op: Op = SUM, group: Group = None) -> int:
    """Replace `tensor` by the sum over all ranks, the same bits on all."""
    ring = Ring(group)
    (local,) = prepare([tensor], ring)
    divide(local, op, ring)
    chunks = local.view(-1).tensor_split(ring.size)
    reduce_scatter_phase(chunks, ring)
    all_gather_phase(chunks, ring)
    tensor.detach().copy_(local)
    return ring.sent


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Op = SUM,
    group: Group = None,
) -> int:
    """Fill `output` with the sum over all ranks of their `input_list[rank]`."""
    ring = Ring(group)
    _, *inputs = prepare([output, *input_list], ring)
    copies = torch.stack(inputs)
    divide(copies, op, ring)
    reduce_scatter_phase([chunk.view(-1) for chunk in copies], ring)
    output.detach().copy_(copies[ring.rank])
    return ring.sent


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None
) -> int:
    """Fill `tensor_list[r]` with the `tensor` of rank r."""
    ring = Ring(group)
    local, *chunks = prepare([tensor, *tensor_list], ring)
    chunks[ring.rank].copy_(local)
    all_gather_phase([chunk.view(-1) for chunk in chunks], ring)
    for output, chunk in zip(tensor_list, chunks, strict=True):
        output.detach().copy_(chunk)
    return ring.sent


def root_all_reduce(tensor: Tensor, group: Group = None) -> int:
    """The sum without a ring: rank 0 receives, adds, and sends it to all."""
    ring = Ring(group)
    (local,) = prepare([tensor], ring)
    others = range(1, ring.size) if ring.rank == 0 else [0]
    if ring.rank == 0:
        received = torch.empty_like(local)
        for rank in others:
            dist.recv(received, group=group, group_src=rank)
            local += received
        for rank in others:
            dist.send(local, group=group, group_dst=rank)
    else:
        dist.send(local, group=group, group_dst=0)
        dist.recv(local, group=group, group_src=0)
    tensor.detach().copy_(local)
    return local.nbytes * len(others)


def prepare(tensors: list[Tensor], ring: Ring) -> list[Tensor]:
    """Contiguous, and in host memory for gloo, which only sends from there."""
    if not isinstance(tensors[0], Tensor):
        raise TypeError(f"expected a tensor, not {type(tensors[0]).__name__}")
    kinds = {(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(f"the tensors must be alike, not {kinds}")
    if len(tensors) not in (1, 1 + ring.size):
        raise ValueError(f"expected one tensor per rank, {ring.size} in all")
    if f"{tensors[0].device.type}:gloo" in dist.get_backend_config(ring.group):
        return [tensor.detach().cpu().contiguous() for tensor in tensors]
    return [tensor.detach().contiguous() for tensor in tensors]


def divide(tensor: Tensor, op: Op, ring: Ring) -> None:
    """For the mean, before anything is sent."""
    if op not in (SUM, AVG):
        raise ValueError(f"op must be SUM or AVG, not {op}")
    if op == AVG:
        tensor /= ring.size
