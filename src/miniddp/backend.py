"""Which backend? The ranks agree on one before their process group starts."""

import json
import warnings
from typing import Any

import torch
import torch.distributed as dist

NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"
"""NCCL for tensors on GPUs, Gloo for those in host memory and for objects."""


def agree(
    store: Any,
    rank: int,
    world_size: int,
    backend: str | None,
    device: torch.device,
) -> str:
    """The backend for all ranks, who meet in `store`; this one has `device`.

    It is the one that they ask for. If none does, it is `NCCL_AND_GLOO` where
    every rank has a GPU that no other rank has, and gloo everywhere else, of
    which rank 0 warns if there is a GPU.

    Raises `ValueError` on every rank if they ask for different ones.
    """
    wish = None if backend is None else str(backend).lower()
    answer = {"backend": wish, "gpu": _gpu(device)}
    answers = _exchange(store, rank, world_size, answer)
    wishes = _wishes([answer["backend"] for answer in answers])
    if len(wishes) > 1:
        asked = [f"rank {peer} for {name}" for name, peer in wishes.items()]
        raise ValueError(
            f"the ranks ask for different backends, {' and '.join(asked)}: "
            "pass the same one on every rank, or none on any"
        )
    if wishes:
        return next(iter(wishes))
    gpus = [answer["gpu"] for answer in answers]
    obstacle = _obstacle(gpus)
    if obstacle is None:
        return NCCL_AND_GLOO
    if rank == 0 and any(gpus):
        warnings.warn(
            f"{obstacle}: all ranks use gloo, as nccl needs a GPU for each",
            stacklevel=3,
        )
    return "gloo"


def _exchange(
    store: Any, rank: int, world_size: int, answer: dict[str, Any]
) -> list[dict[str, Any]]:
    """The answers of all ranks, of which this one gives `answer`."""
    start = store.add("miniddp/starts", 0)  # it may have seen an earlier one
    keys = [f"miniddp/{start}/{peer}" for peer in range(world_size)]
    store.set(keys[rank], json.dumps(answer))
    answers = [json.loads(store.get(key)) for key in keys]
    store.set(f"{keys[rank]}/read", "")
    if rank == 0:  # its process may hold the store, so it leaves last
        store.wait([f"{key}/read" for key in keys])
        store.add("miniddp/starts", 1)
    return answers


def _gpu(device: torch.device) -> str | None:
    """A name for this GPU that all processes share; None if NCCL has none."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def _wishes(backends: list[str | None]) -> dict[str, int]:
    """The backends that ranks ask for, and the first rank that does."""
    wishes: dict[str, int] = {}
    for rank, backend in enumerate(backends):
        if backend is not None:
            wishes.setdefault(backend, rank)
    return wishes


def _obstacle(gpus: list[str | None]) -> str | None:
    """Why these ranks cannot use NCCL, if so."""
    ranks: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is None:
            return f"rank {rank} has no GPU that NCCL can use"
        if gpu in ranks:
            return f"ranks {ranks[gpu]} and {rank} have the same GPU"
        ranks[gpu] = rank
    return None
