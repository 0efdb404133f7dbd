"""Checkpoints: saved whole or not at all, continued bit for bit.

    path = latest("checkpoints")
    step = load(path, shared, local)[0] if path else 0
    ...
    save("checkpoints", step, {"model": model}, {"sampler": sampler})

What is alike on every rank is `shared`, and rank 0's is saved. What differs is
`local`: every rank's is saved, and its random state. One file holds it all, so
that there is never a part of a checkpoint: tensors as safetensors, the rest as
JSON in the header, beside a SHA-256 of the file. Reading it executes nothing.
All ranks call these functions, and an error of one is raised on all.
"""

import logging
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from miniddp.process import check_group
from miniddp.state_file import CheckpointError, on_cpu, read_state, write_state
from miniddp.together import Group, first_rank, from_rank_0, succeed_together

logger = logging.getLogger(__name__)
EMPTY: Mapping[str, Any] = {}


def save(
    folder: str | Path,
    step: int,
    shared: Mapping[str, Any],
    local: Mapping[str, Any] = EMPTY,
    extra: Any = None,
    keep: int | None = None,
    process_group: Group = None,
) -> Path:
    """Write `folder/step-<step>.safetensors`; leave `keep` of those up to it.

    `shared` and `local` map names to objects with a `state_dict()`, or to
    states. Pass the module, not its wrapper; as `local` if its buffers differ
    from rank to rank. `extra` is plain data, such as the options.

    Raises `CheckpointError` if that fails, such as on a full disk: those that
    were there before are then whole.
    """
    check_group(process_group)
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step must be >= 0 and keep >= 1: {step}, {keep}")
    path = Path(folder) / f"step-{step:08d}.safetensors"
    where = f"cannot save step {step} in {folder}: "
    mine = succeed_together(
        lambda: on_cpu([_states(local), random_state()]),
        *(CheckpointError, process_group, where),
    )
    first = dist.get_rank(process_group) == 0
    ranks = [None] * dist.get_world_size(process_group) if first else None
    dist.gather_object(mine, ranks, first_rank(process_group), process_group)

    def write() -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        for unfinished in path.parent.glob("step-*.unfinished"):
            unfinished.unlink()  # of a process that was killed
        state = {"step": step, "shared": _states(shared), "ranks": ranks}
        write_state(path, {**state, "extra": extra})
        if keep is not None:
            _remove_old(path, keep)
        return path

    return from_rank_0(write, CheckpointError, process_group, where)


def load(
    path: str | Path,
    shared: Mapping[str, Any],
    local: Mapping[str, Any] = EMPTY,
    process_group: Group = None,
) -> tuple[int, Any]:
    """Restore the objects from rank 0's `path`; returns step and `extra`.

    Every rank's random state is restored too. Give a `DataLoader` a `generator`
    of its own: else a resume within an epoch draws one random number more.

    Raises `CheckpointError` for a file that is missing, foreign, damaged, not
    the same on all ranks or of another number of ranks or kind of device; and
    for a state that does not fit: of a module, before anything is changed.
    """
    check_group(process_group)
    rank = dist.get_rank(process_group)
    world_size = dist.get_world_size(process_group)
    path = from_rank_0(lambda: Path(path), CheckpointError, process_group)
    state, digest = succeed_together(
        lambda: read_state(path), CheckpointError, process_group
    )
    digests = [""] * world_size
    dist.all_gather_object(digests, digest, group=process_group)

    def restore() -> None:
        if len(set(digests)) > 1:
            raise ValueError("it is not the same file on every rank")
        if not isinstance(state, dict) or "ranks" not in state:
            raise ValueError("it is no checkpoint of a training")
        if len(state["ranks"]) != world_size:
            before = len(state["ranks"])
            raise ValueError(
                f"saved on {before} ranks, now there are {world_size}: the "
                f"random states and places in the data are those of {before}"
            )
        own, numbers = state["ranks"][rank]
        if (numbers[-1] is None) == torch.cuda.is_available():
            raise ValueError("its random states are not of a device like this")
        objects, states = {**shared, **local}, {**state["shared"], **own}
        _check_fits(objects, states)
        for name, target in objects.items():
            target.load_state_dict(states[name])
        set_random_state(numbers)

    where = f"cannot load {path}: "
    succeed_together(restore, CheckpointError, process_group, where)
    return state["step"], state["extra"]


def latest(folder: str | Path, process_group: Group = None) -> Path | None:
    """Rank 0's newest checkpoint that is whole; None if there is none at all.

    A damaged one is named in a warning and the one before it is taken. Only
    damaged ones are a `CheckpointError`: else training would begin anew.
    """
    check_group(process_group)

    def newest() -> Path | None:
        damage = None
        for path in reversed(_checkpoints(Path(folder))):
            try:
                read_state(path)
                return path
            except CheckpointError as error:
                logger.warning("skipped a checkpoint: %s", error)
                damage = damage or error
        if damage:
            raise CheckpointError(f"no whole checkpoint in {folder}: {damage}")
        return None

    return from_rank_0(newest, CheckpointError, process_group)


def random_state() -> tuple[Any, ...]:
    """Of Python's, NumPy's and torch's generators, and this rank's GPU's."""
    name, keys, *rest = np.random.get_state()
    numpy = (name, np.asarray(keys).tolist(), *rest)
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), numpy, torch.get_rng_state(), gpu


def set_random_state(state: tuple[Any, ...]) -> None:
    """Go on from a `random_state()` of the same kind of device."""
    python, numpy, cpu, gpu = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)


def _states(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in objects.items()
    }


def _check_fits(objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Name a state that is missing, or a module's tensor that differs."""
    if missing := objects.keys() - states.keys():
        raise ValueError(f"no {min(missing)!r} in it, only {sorted(states)}")
    for name, target in objects.items():
        if isinstance(target, nn.Module):
            here, saved = _shapes(target.state_dict()), _shapes(states[name])
            if different := here.items() ^ saved.items():
                key = min(different)[0]
                shapes = f"{saved.get(key)} in it, {here.get(key)} here"
                raise ValueError(f"{key!r} of {name!r} has shape {shapes}")


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(getattr(v, "shape", ())) for key, v in state.items()}


def _checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints, the oldest first."""
    found = folder.glob("step-*.safetensors")
    named = [path for path in found if re.fullmatch(r"step-\d{8,}", path.stem)]
    return sorted(named, key=lambda path: (len(path.name), path.name))


def _remove_old(newest: Path, keep: int) -> None:
    """Leave `keep` of the checkpoints up to `newest`."""
    steps = _checkpoints(newest.parent)
    for path in steps[: max(0, steps.index(newest) + 1 - keep)]:
        try:
            path.unlink()
        except OSError as error:
            reason = error.strerror
            logger.warning("cannot remove the old %s: %s", path, reason)
