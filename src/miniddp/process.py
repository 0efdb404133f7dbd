"""Who am I? The process group, this rank's numbers, its device and seeds."""

import contextlib
import logging
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

logger = logging.getLogger(__name__)
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
    `backend=None` takes nccl on GPUs, and gloo on CPUs or where this machine
    has more ranks (`LOCAL_WORLD_SIZE`) than a rank sees GPUs.

    Raises `RuntimeError` if nothing says which rank this is.
    """
    rank = kwargs.get("rank", os.environ.get("RANK"))
    if rank is None:
        raise RuntimeError(
            "RANK is not set: start this program with torchrun, call the "
            "function through miniddp.run_ranks, or pass rank and world_size"
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
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if 0 < gpus < ranks and _local_rank() == 0:
        logger.warning(
            f"{ranks} ranks of this machine see {gpus} GPUs: gloo, not nccl. "
            "Pass backend='nccl' if each sees another one"
        )
    return "nccl" if ranks <= gpus and dist.is_nccl_available() else "gloo"


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


def check_group(process_group: Group = None) -> None:
    """Raise `RuntimeError` without a process group, `ValueError` outside it."""
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call miniddp.process."
            "init_process_group() under torchrun, or use miniddp.run_ranks"
        )
    if dist.get_rank(process_group) < 0:
        what = "is not a member of the process group it passed"
        raise ValueError(f"rank {dist.get_rank()} {what}")


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
