"""Who am I? The process group, this rank's numbers, its device and seeds."""

import contextlib
import os
import random
from datetime import timedelta
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def init_process_group(
    backend: str | None = None,
    timeout: timedelta | None = None,
    **kwargs: Any,
) -> None:
    """Start the default process group, with `device()` as the current device.

    Ranks come from torchrun's environment variables, or by hand through
    torch's own keywords (`init_method`, `rank`, `world_size`, `store`).
    `backend=None` takes nccl on GPUs, and gloo on CPUs or where the ranks of
    this machine (`LOCAL_WORLD_SIZE`) have to share its GPUs.

    Raises `RuntimeError` if nothing says which rank this is.
    """
    rank = kwargs.get("rank", os.environ.get("RANK"))
    if rank is None:
        raise RuntimeError(
            "RANK is not set: start this program with torchrun, call the "
            "function through miniddp.run_ranks, or pass rank, world_size and "
            "init_method"
        )
    backend = backend or _backend()
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        own = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
        if "nccl" in backend:
            kwargs["device_id"] = own
    dist.init_process_group(backend, timeout=timeout, **kwargs)


def _backend() -> str:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    a_gpu_each = ranks_here <= torch.cuda.device_count()
    return "nccl" if a_gpu_each and dist.is_nccl_available() else "gloo"


def destroy_process_group() -> None:
    """End the default process group, if any, and forget the registered mesh.

    Not in a `finally`: after an error it would wait for the other ranks, and
    nobody would see the error.
    """
    get.register_mesh(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def device() -> torch.device:
    """This rank's: `cuda:{local rank % number of GPUs}`, without GPUs `cpu`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", _local_rank() % torch.cuda.device_count())


def _local_rank() -> int:
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return dist.get_rank() if dist.is_initialized() else 0


def check_group(process_group: dist.ProcessGroup | None = None) -> None:
    """Raise `RuntimeError` without a process group, `ValueError` outside it."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call miniddp.process."
            "init_process_group() in a program that torchrun starts, or call "
            "the function through miniddp.run_ranks"
        )
    if dist.get_rank(process_group) < 0:
        what = "is not a member of the process group it passed"
        raise ValueError(f"rank {dist.get_rank()} {what}")


Number = Literal["rank", "grank", "lrank", "ws"]
Mesh = DeviceMesh | None
Group = dist.ProcessGroup


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

    @overload
    def __call__(self, name: Number, mesh: Mesh = None) -> int: ...
    @overload
    def __call__(self, name: Literal["pg"], mesh: Mesh = None) -> Group: ...
    def __call__(self, name: str, mesh: Mesh = None) -> int | Group:
        if name not in ("rank", "grank", "lrank", "ws", "pg"):
            raise ValueError(
                f"get knows rank, grank, lrank, ws and pg, not {name!r}"
            )
        check_group()
        mesh = mesh or self._mesh
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(
                f"get needs a mesh of one dimension, this one has {mesh.ndim}: "
                f"pass one of {mesh.mesh_dim_names}, such as mesh[name]"
            )
        group = dist.group.WORLD if mesh is None else mesh.get_group()
        assert group is not None
        if name == "pg":
            return group
        if name == "grank":
            return dist.get_rank()
        if name == "lrank":
            return _local_rank() if mesh is None else mesh.get_local_rank()
        return group.rank() if name == "rank" else group.size()


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
