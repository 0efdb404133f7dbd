"""Who am I? The process group, this rank's numbers and device, and its random seeds."""

import os
import random
from datetime import timedelta
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def init_process_group(
    backend: str | None = None, timeout: timedelta | None = None, **kwargs: Any
) -> None:
    """Start the default process group and make `device()` the current CUDA device.

    Ranks come from torchrun's environment variables, or by hand through torch's own keywords
    (`init_method`, `rank`, `world_size`, `store`). `backend=None` takes nccl if every rank on this
    machine has a GPU of its own, else gloo.

    Raises `RuntimeError` if neither the environment nor `kwargs` say which rank this is.
    """
    if "rank" not in kwargs and "RANK" not in os.environ:
        raise RuntimeError(
            "RANK is not set: start this program with torchrun, call the function through "
            "miniddp.run_ranks, or pass rank, world_size and init_method"
        )
    if backend is None:
        local_world_size = os.environ.get("LOCAL_WORLD_SIZE") or kwargs.get("world_size", 1)
        backend = _backend(int(local_world_size), torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timeout, **kwargs)
    if torch.cuda.is_available():
        torch.cuda.set_device(device())


def _backend(local_world_size: int, gpu_count: int) -> str:
    return "nccl" if local_world_size <= gpu_count and dist.is_nccl_available() else "gloo"


def destroy_process_group() -> None:
    """End the default process group, if there is one, and forget the registered mesh."""
    get.register_mesh(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def device() -> torch.device:
    """This rank's device: `cuda:{local rank % number of GPUs}`, or `cpu` where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", _local_rank() % torch.cuda.device_count())


def _local_rank() -> int:
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return dist.get_rank() if dist.is_initialized() else 0


def check_group(process_group: dist.ProcessGroup | None = None) -> None:
    """Raise `RuntimeError` without a process group, `ValueError` if this rank is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call miniddp.process.init_process_group() in a program "
            "that torchrun starts, or call the function through miniddp.run_ranks"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group it passed")


Number = Literal["rank", "grank", "lrank", "ws"]


class _Get:
    """`get("rank")` and its like. Each takes a one-dimensional device mesh, or uses the registered
    one, or the default process group.

    | name | value |
    |---|---|
    | `rank` | this rank's number in the group |
    | `grank` | its number among all ranks |
    | `lrank` | its number in the mesh; without a mesh, on its machine |
    | `ws` | number of ranks in the group |
    | `pg` | the process group |

    Raises `RuntimeError` if there is no process group, `ValueError` for another name or for a mesh
    of several dimensions.
    """

    _mesh: DeviceMesh | None = None

    def register_mesh(self, mesh: DeviceMesh | None) -> None:
        """Use `mesh` in every later call that passes none; `None` forgets it."""
        self._mesh = mesh

    @overload
    def __call__(self, name: Number, mesh: DeviceMesh | None = None) -> int: ...
    @overload
    def __call__(
        self, name: Literal["pg"], mesh: DeviceMesh | None = None
    ) -> dist.ProcessGroup: ...
    def __call__(self, name: str, mesh: DeviceMesh | None = None) -> int | dist.ProcessGroup:
        if name not in ("rank", "grank", "lrank", "ws", "pg"):
            raise ValueError(f"get knows rank, grank, lrank, ws and pg, not {name!r}")
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
        return dist.get_rank(group) if name == "rank" else dist.get_world_size(group)


get = _Get()


def set_seed(seed: int, rank_offset: int = 0) -> None:
    """Seed Python, NumPy and torch (CPU and GPUs) with `seed + rank_offset`.

    The same seed on every rank gives the same initial weights and shuffles; an offset of the rank
    gives each rank dropout masks and augmentation of its own.
    """
    seed = (seed + rank_offset) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
