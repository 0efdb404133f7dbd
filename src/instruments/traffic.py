"""What collectives bring to a rank, counted as they are called."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Within it, `received` adds up the bytes that collectives bring to this rank.

    PyTorch's dispatcher sees each collective with its tensors. An all-reduce counts as
    that of a ring, 2 (N - 1) / N S bytes. What all ranks receive is what all send. Raises
    `NotImplementedError` for a collective that it cannot count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.received = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.received += _bytes_received(name, args)
        return func(*args, **(kwargs or {}))


def _bytes_received(name: str, args: Any) -> float:
    """Of a collective by its name in c10d, with its arguments there."""
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    first = sum(
        leaf.nbytes for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)
    )
    if name == "allreduce_":
        return 2 * share * first
    if name == "_allgather_base_":
        return share * first
    if name == "_reduce_scatter_base_":
        return share * float(args[1].nbytes)
    if name == "broadcast_":
        root = args[2]
        return 0 if root == dist.get_rank() else first
    if name == "recv_":
        return first
    if name in ("send", "barrier"):
        return 0
    raise NotImplementedError(f"bytes of c10d::{name}")
