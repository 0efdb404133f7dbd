"""Who am I? The process group, this rank's numbers, its device and seeds."""

import contextlib
import os
import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Imported later, as torch.optim does, it would keep the process group for good:
# as default arguments. Its threads then abort some of Python's exits.
import torch.distributed.nn.functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from miniddp.backend import agree

Group = dist.ProcessGroup | None
Mesh = DeviceMesh | None


def init_process_group(
    backend: str | None = None,
    timeout: timedelta | None = None,
    **kwargs: Any,
) -> None:
    """Start the default process group, with `device()` as the current device.

    Ranks come from torchrun's environment variables, or by hand through
    torch's own keywords (`init_method`, `rank`, `world_size`, `store`).
    `backend=None` takes "cpu:gloo,cuda:nccl" if every rank has a GPU that no
    other rank has. If not, all ranks take gloo, and rank 0 warns if there are
    GPUs. Without `timeout` it is torch's, 30 minutes for both of them.

    Raises `RuntimeError` if nothing says which rank this is, `ValueError` if
    its number is too large or, on every rank, if they pass different backends.
    """
    if dist.is_initialized():
        raise RuntimeError("the default process group has started already")
    rank = int(kwargs.pop("rank", os.environ.get("RANK", -1)))
    if rank < 0:
        raise RuntimeError(
            "RANK is not set: start this program with torchrun, call the "
            "function through miniddp.run_ranks, or pass rank and world_size"
        )
    chosen = _device_of(int(os.environ.get("LOCAL_RANK", rank)))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    world_size = int(kwargs.pop("world_size", os.environ.get("WORLD_SIZE", -1)))
    store = kwargs.pop("store", None)
    if store is None:
        url = kwargs.pop("init_method", None) or "env://"
        patience = timeout or dist.default_pg_timeout
        meeting = rendezvous(url, rank, world_size, timeout=patience)
        store, rank, world_size = next(meeting)
        store.set_timeout(patience)
    if rank >= world_size:
        raise ValueError(
            f"rank {rank} needs a larger world_size than {world_size}"
        )
    backend = agree(store, rank, world_size, backend, chosen)
    if chosen.type == "cuda" and "nccl" in backend:
        kwargs["device_id"] = chosen
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=store,
        rank=rank,
        world_size=world_size,
        **kwargs,
    )


def destroy_process_group() -> None:
    """End the default process group, if any, and forget the registered mesh.

    Not in a `finally`: after an error it would wait for the other ranks, and
    nobody would see the error.
    """
    get.register_mesh(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def device() -> torch.device:
    """This rank's device: a GPU that it sees, or `cpu` where it sees none.

    Of the GPUs that it sees it is number `local rank % number of GPUs`: a rank
    that sees one takes that one, and ranks that outnumber the GPUs share them,
    over gloo. Where nothing sets LOCAL_RANK it is the rank, once the group has
    started.
    """
    return _device_of(_local_rank())


def _device_of(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _local_rank() -> int:
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return dist.get_rank() if dist.is_initialized() else 0


def check_group(process_group: Group = None) -> None:
    """Raise `RuntimeError` without a process group, `ValueError` outside it."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call miniddp.process."
            "init_process_group() under torchrun, or use miniddp.run_ranks"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group "
            "it passed"
        )


class _Get:
    """`get(name)` of the default process group, or of a device mesh of one
    dimension that is passed or registered.

    | name | value |
    |---|---|
    | `rank` | this rank's number in the group |
    | `grank` | its number among all ranks |
    | `lrank` | its number in the mesh; without a mesh, on its machine |
    | `ws` | number of ranks in the group |
    | `pg` | the process group |

    Raises `RuntimeError` if there is no process group, `ValueError` for
    another name or for a mesh of several dimensions.
    """

    _mesh: Mesh = None

    def register_mesh(self, mesh: Mesh) -> None:
        """Use `mesh` in each call that passes none; `None` forgets it."""
        self._mesh = mesh

    def __call__(self, name: str, mesh: Mesh = None) -> Any:
        check_group()
        mesh = mesh or self._mesh
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(
                f"get needs a mesh of one dimension, this one has {mesh.ndim}: "
                f"pass one of {mesh.mesh_dim_names}, such as mesh[name]"
            )
        group = dist.group.WORLD if mesh is None else mesh.get_group()
        values = {
            "rank": dist.get_rank(group),
            "grank": dist.get_rank(),
            "lrank": _local_rank() if mesh is None else mesh.get_local_rank(),
            "ws": dist.get_world_size(group),
            "pg": group,
        }
        if name not in values:
            raise ValueError(f"get knows {', '.join(values)}, not {name!r}")
        return values[name]


get = _Get()


def set_seed(seed: int, rank_offset: int = 0) -> None:
    """Seed Python, NumPy and torch (CPU, GPUs) with `seed + rank_offset`.

    The same seed on every rank gives the same initial weights and shuffles;
    an offset of the rank gives each its own dropout masks and augmentation.
    """
    seed = (seed + rank_offset) % 2**32
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed)
