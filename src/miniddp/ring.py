"""All-reduce as a ring, built from nothing but send and receive.

The ranks stand in a circle: each sends to its right and receives from its left. A tensor is cut
into one chunk per rank. In the reduce-scatter phase every chunk travels once round the circle and
each rank adds its own part, so that each rank ends with one complete chunk. In the all-gather
phase the complete chunks travel round once more. In total a rank sends 2 (N - 1) / N times the
tensor's bytes, the least possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009); in `root_all_reduce` rank 0 sends N - 1 times.

The functions take the arguments of their namesakes in `torch.distributed`, block until done and
return the number of bytes that this rank sent. Every rank of the group has to call them, with
tensors of the same shape and dtype. A rank outside the group gets a warning and sends nothing.
"""

import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from miniddp.arguments import check_list, check_op, check_tensors, equal_parts, reachable

Op = ReduceOp.RedOpType
Group = ProcessGroup | None

SEGMENT_BYTES = 4 * 2**20
"""A chunk travels in segments, so that one can be added while the next ones are on their way."""

AHEAD = 2
"""How many segments are on their way while one is being added."""

COMBINE: dict[Op, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


@dataclass(frozen=True)
class Ring:
    """The circle as one rank sees it: `rank` and `size` count within `group`."""

    group: Group
    rank: int
    size: int

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.size

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.size

    def exchange(self, outgoing: Tensor, incoming: Tensor) -> list[dist.Work]:
        """Start to send `outgoing` to the right and to receive `incoming` from the left."""
        operations = [
            dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=self.left),
            dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=self.right),
        ]
        filled = [operation for operation in operations if operation.tensor.numel() > 0]
        with self.naming_neighbours():
            return dist.batch_isend_irecv(filled) if filled else []

    def wait(self, works: list[dist.Work]) -> None:
        with self.naming_neighbours():
            for work in works:
                work.wait()

    @contextmanager
    def naming_neighbours(self) -> Iterator[None]:
        """Say in a backend's error, as after a timeout, which ranks could not reach each other."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"the ring is broken: rank {self.rank} of {self.size} could not receive from rank "
                f"{self.left} or send to rank {self.right}: {error}"
            ) from error


def all_reduce(tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None) -> int:
    """Replace `tensor` on every rank by the reduction over all ranks, bit for bit the same on all.

    AVG adds, then divides. Raises `ValueError` for a tensor that is not contiguous or an op that
    is not defined for its dtype, `RuntimeError` for AVG of integers.
    """
    ring = find_ring(group)
    if ring is None:
        return 0
    check_tensors(tensor)
    check_op(op, tensor)
    with reachable(group, tensor) as (local,):
        chunks = local.view(-1).tensor_split(ring.size)
        return reduce_scatter_phase(chunks, op, ring) + all_gather_phase(chunks, ring)


def reduce_scatter_phase(chunks: Sequence[Tensor], op: Op, ring: Ring) -> int:
    """Complete chunk number `rank` on each rank; the other chunks are left partly reduced."""
    longest = max(chunks, key=Tensor.numel)
    count = max(1, math.ceil(longest.nbytes / SEGMENT_BYTES))
    landing = landing_buffers(1 + AHEAD, longest.tensor_split(count)[0])
    sent = 0
    for send, receive in reduce_scatter_steps(ring.rank, ring.size):
        outgoing = chunks[send].tensor_split(count)
        own = chunks[receive].tensor_split(count)
        incoming = [buffer[: len(part)] for buffer, part in zip(cycle(landing), own)]
        for part, arrived in zip(own, arrivals(outgoing, incoming, ring), strict=True):
            COMBINE[op](part, arrived, out=part)
        sent += chunks[send].nbytes
    if op == ReduceOp.AVG:
        chunks[ring.rank].div_(ring.size)
    return sent


class HostMemory(threading.local):
    """Kept from call to call: the pages of new memory would cost more time than the adding."""

    memory = torch.empty(0, dtype=torch.uint8)


HOST = HostMemory()


def landing_buffers(count: int, like: Tensor) -> Sequence[Tensor]:
    """Room for `count` segments to arrive in, each of the size of `like`."""
    if like.device.type != "cpu":
        return [torch.empty_like(like) for _ in range(count)]
    if HOST.memory.numel() < count * like.nbytes:
        HOST.memory = torch.empty(count * like.nbytes, dtype=torch.uint8)
    memory = HOST.memory[: count * like.nbytes]
    return memory.view(like.dtype).view(count, like.numel()).unbind()


def reduce_scatter_steps(rank: int, size: int) -> list[tuple[int, int]]:
    """The chunk to send and the chunk to receive in each step; the last one received is `rank`."""
    return [((rank - step - 1) % size, (rank - step - 2) % size) for step in range(size - 1)]


def arrivals(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], ring: Ring
) -> Iterator[Tensor]:
    """Exchange segment by segment; yield what has arrived while the next ones are on their way."""
    under_way: deque[list[dist.Work]] = deque()
    for number in range(len(incoming) + AHEAD):
        if number < len(incoming):
            under_way.append(ring.exchange(outgoing[number], incoming[number]))
        if number >= AHEAD:
            ring.wait(under_way.popleft())
            yield incoming[number - AHEAD]


def all_gather_phase(chunks: Sequence[Tensor], ring: Ring) -> int:
    """Copy chunk number r, which rank r has complete, to all ranks."""
    sent = 0
    for send, receive in all_gather_steps(ring.rank, ring.size):
        ring.wait(ring.exchange(chunks[send], chunks[receive]))
        sent += chunks[send].nbytes
    return sent


def all_gather_steps(rank: int, size: int) -> list[tuple[int, int]]:
    """The chunk to send and the chunk to receive in each step; the first one sent is `rank`."""
    return [((rank - step) % size, (rank - step - 1) % size) for step in range(size - 1)]


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Op = ReduceOp.SUM, group: Group = None
) -> int:
    """Fill `output` with the reduction over all ranks of `input_list[rank]`.

    Raises as `all_reduce` does, and `ValueError` unless `input_list` holds one tensor of
    `output`'s shape and dtype per rank.
    """
    ring = find_ring(group)
    if ring is None:
        return 0
    check_tensors(output, *input_list)
    check_list("input_list", input_list, output, ring.size)
    check_op(op, output)
    with reachable(group, output) as (local,):
        chunks = [tensor.detach().to(local.device, copy=True).view(-1) for tensor in input_list]
        sent = reduce_scatter_phase(chunks, op, ring)
        local.view(-1).copy_(chunks[ring.rank])
    return sent


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = ReduceOp.SUM, group: Group = None
) -> int:
    """`reduce_scatter` of the equal parts of `input`, which has N times `output`'s elements."""
    ring = find_ring(group)
    if ring is None:
        return 0
    check_tensors(output, input)
    return reduce_scatter(
        output.view(-1), equal_parts("input", input, output, ring.size), op, group
    )


def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None) -> int:
    """Fill `tensor_list[r]` with the `tensor` of rank r.

    Raises `ValueError` unless `tensor_list` holds one contiguous tensor of `tensor`'s shape and
    dtype per rank.
    """
    ring = find_ring(group)
    if ring is None:
        return 0
    check_tensors(tensor, *tensor_list)
    check_list("tensor_list", tensor_list, tensor, ring.size)
    with reachable(group, *tensor_list) as local:
        local[ring.rank].copy_(tensor.detach())
        return all_gather_phase([chunk.view(-1) for chunk in local], ring)


def all_gather_into_tensor(output: Tensor, input: Tensor, group: Group = None) -> int:
    """`all_gather` into the equal parts of `output`, which has N times `input`'s elements."""
    ring = find_ring(group)
    if ring is None:
        return 0
    check_tensors(output, input)
    return all_gather(equal_parts("output", output, input, ring.size), input.view(-1), group)


def root_all_reduce(tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None) -> int:
    """`all_reduce` without a ring: rank 0 receives all tensors, reduces, and sends the result."""
    ring = find_ring(group)
    if ring is None:
        return 0
    check_tensors(tensor)
    check_op(op, tensor)
    if tensor.numel() == 0:
        return 0
    with reachable(group, tensor) as (local,):
        if ring.rank > 0:
            dist.send(local, group=group, group_dst=0)
            dist.recv(local, group=group, group_src=0)
            return local.nbytes
        others = range(1, ring.size)
        received = torch.empty_like(local)
        for rank in others:
            dist.recv(received, group=group, group_src=rank)
            COMBINE[op](local, received, out=local)
        if op == ReduceOp.AVG:
            local.div_(ring.size)
        for rank in others:
            dist.send(local, group=group, group_dst=rank)
        return local.nbytes * len(others)


def find_ring(group: Group) -> Ring | None:
    """The ring of `group` (default: all ranks), or None with a warning on a rank outside it."""
    if dist.get_rank(group) < 0:
        warnings.warn(f"global rank {dist.get_rank()} does not belong to the group", stacklevel=3)
        return None
    return Ring(group, dist.get_rank(group), dist.get_world_size(group))
