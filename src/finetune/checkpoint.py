"""Checkpoints: saved whole or not at all, continued bit for bit.

    found = latest("checkpoints")
    step = load(found, {"model": model, "batches": batches}) if found else 0
    ...
    save("checkpoints", step, {"model": model, "batches": batches})

Rank 0 saves what is alike on every rank, and every rank's random state, in one
file, and it alone reads that file: the others receive what is in it. All ranks
call these functions, and an error of one is raised on all. On a GPU, "bit for
bit" needs `torch.use_deterministic_algorithms(True)`.

Why not `torch.distributed.checkpoint`? Its folder of files has no digest, so a
flipped bit is loaded; its `.metadata` is unpickled; its errors are tracebacks
of twenty lines.
"""

import fcntl
import functools
import logging
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from finetune.job import succeed_together
from finetune.state_file import (
    CheckpointError,
    DamagedError,
    read_state,
    write_state,
)
from miniddp.process import check_group

FORMAT = 2  # 1: what `miniddp.train` wrote, before the trainer was `finetune`
LOCK = ".lock"  # a file: NFS locks no folder for other machines
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A file that rank 0 has read; `state` is None on the other ranks."""

    path: Path
    state: dict[str, Any] | None


def save(
    folder: str | Path, step: int, objects: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write `folder/step-<step>.safetensors`; leave `keep` of those up to it.

    `objects` maps names to what has a `state_dict()`. Pass the module, not its
    wrapper. Raises `CheckpointError` if that fails, such as on a full disk:
    those that were there before are then whole.
    """
    check_group()
    path = Path(folder) / f"step-{step:08d}.safetensors"
    is_rank_0 = dist.get_rank() == 0
    random_states = [None] * dist.get_world_size() if is_rank_0 else None
    dist.gather_object(random_state(), random_states, dst=0)

    def write() -> None:
        if not is_rank_0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "format": FORMAT,
            "step": step,
            "shared": {name: part.state_dict() for name, part in objects.items()},
            "random_states": random_states,
        }
        write_state(path, state)
        remove_old(path, keep)

    context = f"cannot save step {step} in {folder}: "
    succeed_together(write, CheckpointError, context)
    return path


def latest(folder: str | Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if no rank sees any.

    A damaged one is named in a warning, and the one before it is taken.
    `CheckpointError` if none is left, as training would begin anew, and if
    rank 0 cannot read a file for another reason: it may well be whole.
    """
    damage: DamagedError | None = None
    for name in names_newest_first(folder):
        try:
            return read(Path(folder) / name)
        except DamagedError as error:
            logger.warning("skipped a checkpoint: %s", error)
            damage = damage or error
    if damage:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {damage}")
    return None


def read(path: str | Path) -> Checkpoint:
    """Let rank 0 read a checkpoint, once.

    Raises on every rank: `DamagedError`, and `CheckpointError` if it cannot be
    read or is none of this version of the trainer.
    """
    check_group()

    def read_or_find_damage() -> tuple[dict[str, Any] | None, str]:
        if dist.get_rank() != 0:
            return None, ""
        try:
            state, _ = read_state(Path(path))
        except DamagedError as error:
            return None, str(error)
        check_format(state)
        return state, ""

    state, damage = succeed_together(
        read_or_find_damage, CheckpointError, f"cannot read {path}: "
    )
    damage_on_rank_0 = [damage]
    dist.broadcast_object_list(damage_on_rank_0, src=0)
    if damage_on_rank_0[0]:
        raise DamagedError(damage_on_rank_0[0])
    return Checkpoint(Path(path), state)


def check_format(state: Any) -> None:
    """Raise `ValueError` for a state that this version has not saved."""
    parts = {"step", "shared", "random_states"}
    if not isinstance(state, dict) or not parts <= state.keys():
        raise ValueError("it is no checkpoint of a training")
    found = state.get("format", 1)
    if found != FORMAT:
        raise ValueError(
            f"its format is {found}, this version of finetune has {FORMAT}: "
            "go on with the version that began, or anew in another folder"
        )


def load(
    checkpoint: Checkpoint, objects: Mapping[str, Any], elastic: bool = False
) -> int:
    """Restore the objects, in order, and the random state; returns the step.

    On another number of ranks only an `elastic` resume goes on, and random
    numbers begin anew. The ranks receive one object after another, so that
    each needs room on the CPU for the largest, beside what it trains with.

    Raises `CheckpointError` for another number of ranks or kind of device, and
    for a state that does not fit.
    """
    context = f"cannot load {checkpoint.path}: "
    on_rank_0 = checkpoint.state or {}
    shared = on_rank_0.get("shared", {})
    facts = {name: on_rank_0.get(name) for name in ("step", "random_states")}
    facts = broadcast_state(facts, context)
    before = len(facts["random_states"])
    now = dist.get_world_size()
    own_state = facts["random_states"][min(before - 1, dist.get_rank())]

    def check() -> None:
        if before != now and not elastic:
            what = f"saved on {before} ranks, now there are {now}"
            raise ValueError(f"{what}: only an elastic resume goes on")
        if (own_state["gpu"] is None) == torch.cuda.is_available():
            raise ValueError("its random states are not of a device like this")

    succeed_together(check, CheckpointError, context)
    for name, target in objects.items():
        received = broadcast_state(shared.get(name), context)
        restore = functools.partial(target.load_state_dict, received)
        succeed_together(restore, CheckpointError, context)
    if before == now:
        set_random_state(own_state)
    else:
        text = "saved on %d ranks, now there are %d: new random numbers"
        logger.info(text, before, now)
    return int(facts["step"])


def broadcast_state(state: Any, context: str) -> Any:
    """Rank 0's state, copied, on the CPU of every rank.

    Its structure goes first, with tensors that have a shape but no content
    (meta tensors), then each tensor's bytes. If a rank has no room for it, a
    `CheckpointError` on all begins with `context`.
    """
    shapes = [tree_map_only(Tensor, lambda tensor: tensor.to("meta"), state)]
    dist.broadcast_object_list(shapes, src=0)

    def copy_or_allocate() -> Any:
        if dist.get_rank() == 0:
            return tree_map_only(Tensor, torch.clone, state)
        allocate = functools.partial(torch.empty_like, device="cpu")
        return tree_map_only(Tensor, allocate, shapes[0])

    copy = succeed_together(copy_or_allocate, CheckpointError, context)
    for leaf in tree_leaves(copy):
        if isinstance(leaf, Tensor) and leaf.numel() > 0:
            dist.broadcast(leaf.reshape(-1).view(torch.uint8), src=0)
    return copy


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Within it, no other training that asks for this lock uses the folder.

    What a process that was killed has left unfinished there is removed. Raises
    `CheckpointError` if another training holds the lock, on another machine too
    where the file system tells machines of locks, as NFS does.
    """
    check_group()

    def lock() -> None:
        if dist.get_rank() != 0:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = held.enter_context((Path(folder) / LOCK).open("ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError("another training is using it") from error
        for unfinished in Path(folder).glob("step-*.unfinished"):
            shutil.rmtree(unfinished)

    with ExitStack() as held:
        succeed_together(lock, CheckpointError, f"cannot use {folder}: ")
        yield


def random_state() -> dict[str, Any]:
    """Of Python's, NumPy's and torch's generators, and this rank's GPU's."""
    algorithm, keys, *position = np.random.get_state()
    on_gpu = torch.cuda.is_available()
    return {
        "python": random.getstate(),
        "numpy": (algorithm, np.asarray(keys).tolist(), *position),
        "cpu": torch.get_rng_state(),
        "gpu": torch.cuda.get_rng_state() if on_gpu else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on from a `random_state()` of the same kind of device."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if state["gpu"] is not None:
        torch.cuda.set_rng_state(state["gpu"])


def names_newest_first(folder: str | Path) -> list[str]:
    """The finished checkpoints that any rank sees in its folder.

    A shared file system may show one rank an older list than another.
    """
    check_group()
    names_by_rank = [finished(Path(folder))] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, names_by_rank[0])
    return sorted(set().union(*names_by_rank), key=step_of, reverse=True)


def remove_old(newest: Path, keep: int) -> None:
    """Leave `keep` of the checkpoints up to `newest`."""
    folder = newest.parent
    last = step_of(newest.name)
    names = [name for name in finished(folder) if step_of(name) <= last]
    for name in sorted(names, key=step_of)[:-keep]:
        try:
            (folder / name).unlink()
        except OSError as error:
            text = "cannot remove the old %s: %s"
            logger.warning(text, folder / name, error.strerror)


def finished(folder: Path) -> list[str]:
    """The names of checkpoints in a folder; those of unfinished ones differ."""
    found = folder.glob("step-*.safetensors")
    return [path.name for path in found if path.stem[5:].isdecimal()]


def step_of(name: str) -> int:
    return int(name.removeprefix("step-").removesuffix(".safetensors"))
