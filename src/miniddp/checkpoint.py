"""Checkpoints of data-parallel training: saved whole or not at all, continued bit for bit.

    path = latest("checkpoints")
    step = load(path, shared, local).step if path else 0
    ...
    save("checkpoints", step, shared={"model": model, "optimizer": optimizer}, local={"sampler": s})

What is the same on every rank is `shared` and rank 0's is kept; what differs is `local` and every
rank's is kept, with its random state. All of it is in one file that rank 0 writes, so that there
is never a part of a checkpoint. Every function is called by all ranks of the process group, and
every error is raised on all of them.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from miniddp.agree import Group, gather, on_every_rank, on_rank_0
from miniddp.process import check_group
from miniddp.random_state import check_random_state, random_state, set_random_state
from miniddp.state_file import CheckpointError, read_state, write_state

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What `load` read: the step after which it was saved, on how many ranks, and `extra`."""

    step: int
    world_size: int
    extra: Any


def save(
    folder: str | Path,
    step: int,
    shared: Mapping[str, Any],
    local: Mapping[str, Any] | None = None,
    extra: Any = None,
    keep: int | None = None,
    process_group: Group = None,
) -> Path:
    """Write `folder/step-<step>.safetensors` after so many steps, in place of an older such file.

    `shared` (model, optimizer, scheduler, …) and `local` (the sampler) map names to objects with a
    `state_dict()`, or to states. Pass the module itself, not its wrapper, and as `local` if its
    buffers differ from rank to rank (BatchNorm, unless DDP broadcasts them). `extra` is plain data,
    such as the options. With `keep`, only the last so many of the checkpoints up to this step
    stay.

    Raises `CheckpointError` if the file cannot be written, such as on a full disk. The checkpoints
    that were there before are then intact.
    """
    check_group(process_group)
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step must be at least 0 and keep at least 1, not {step} and {keep}")
    mine = on_every_rank(
        lambda: (_states(local or {}), random_state()), CheckpointError, process_group
    )
    ranks = gather(mine, process_group)

    def write() -> Path:
        path = Path(folder) / f"step-{step:08d}.safetensors"
        state = {"step": step, "ranks": ranks, "shared": _states(shared), "extra": extra}
        path.parent.mkdir(parents=True, exist_ok=True)
        for unfinished in path.parent.glob("step-*.safetensors.unfinished"):
            unfinished.unlink()  # of a process that was killed
        write_state(path, state)
        return path

    path = on_rank_0(
        write, CheckpointError, process_group, f"cannot save step {step} in {folder}: "
    )
    if keep is not None and dist.get_rank(process_group) == 0:
        _remove(_steps(path.parent), step, keep)
    return path


def load(
    path: str | Path,
    shared: Mapping[str, Any],
    local: Mapping[str, Any] | None = None,
    shared_only: bool = False,
    process_group: Group = None,
) -> Restored:
    """Hand the states in rank 0's `path` to the `load_state_dict` of the objects, on every rank.

    Then restore each rank's random state, so that training goes on bit for bit. `shared_only`
    leaves `local` and the random states as they are: for another world size, or to evaluate.
    Give a `DataLoader` a `generator` of its own: without one, each new iterator draws a number from
    torch's random state, and a resume in the middle of an epoch makes one more of them.

    Raises `CheckpointError` for a file that is missing, foreign, cut off, damaged or not the same
    on all ranks; if a state is missing or does not fit its object; and, unless `shared_only`, if
    it was saved on another number of ranks or another kind of device. Modules are checked before
    any object is changed.
    """
    check_group(process_group)
    path = on_rank_0(lambda: Path(path), CheckpointError, process_group)
    local = {} if shared_only or local is None else local
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    state, digest = on_every_rank(lambda: read_state(path), CheckpointError, process_group)
    digests = [""] * world_size
    dist.all_gather_object(digests, digest, group=process_group)

    def check() -> Any:
        if len(set(digests)) > 1:
            raise CheckpointError(f"{path} is not the same file on every rank")
        if not isinstance(state, dict) or set(state) != {"step", "ranks", "shared", "extra"}:
            raise CheckpointError(f"{path} is no checkpoint of a training")
        _check_fits(path, shared, state["shared"])
        if shared_only:
            return None
        if len(state["ranks"]) != world_size:
            raise CheckpointError(
                f"{path} was saved on {len(state['ranks'])} ranks, now there are {world_size}: "
                "their random states and places in the data cannot be continued; "
                f"shared_only=True goes on with {', '.join(shared)} alone"
            )
        states, random_numbers = state["ranks"][rank]
        _check_fits(path, local, states)
        check_random_state(random_numbers)
        return states, random_numbers

    mine = on_every_rank(check, CheckpointError, process_group)

    def restore() -> None:
        for name, target in shared.items():
            target.load_state_dict(state["shared"][name])
        if mine is not None:
            for name, target in local.items():
                target.load_state_dict(mine[0][name])
            set_random_state(mine[1])

    on_every_rank(restore, CheckpointError, process_group, f"{path} does not fit: ")
    return Restored(state["step"], len(state["ranks"]), state["extra"])


def latest(folder: str | Path, process_group: Group = None) -> Path | None:
    """Rank 0's newest checkpoint that is whole, or None if there is none at all.

    A damaged one is named in a warning and the one before it is taken. If there are only damaged
    ones, that is a `CheckpointError`: training must not begin anew without anyone noticing.
    """
    check_group(process_group)

    def newest() -> Path | None:
        damage: list[str] = []
        for _, path in reversed(_steps(Path(folder))):
            try:
                read_state(path)
            except CheckpointError as error:
                damage.append(str(error))
                continue
            for reason in damage:
                logger.warning("skipped a checkpoint: %s; going on from %s", reason, path.name)
            return path
        if damage:
            raise CheckpointError(f"no checkpoint in {folder} can be used: {damage[0]}")
        return None

    return on_rank_0(newest, CheckpointError, process_group)


def _states(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in objects.items()
    }


def _check_fits(path: Path, objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Name the first object without a state, or tensor of a module that differs."""
    for name, target in objects.items():
        if name not in states:
            raise CheckpointError(f"{path} has no state {name!r}, it has {sorted(states)}")
        if not isinstance(target, torch.nn.Module):
            continue
        own, saved = (
            {key: tuple(getattr(value, "shape", ())) for key, value in tensors.items()}
            for tensors in (target.state_dict(), states[name])
        )
        for key in [*own, *saved]:
            if own.get(key) != saved.get(key):
                raise CheckpointError(
                    f"{path} does not fit: {key!r} of {name!r} has shape "
                    f"{saved.get(key, 'missing')} in it, {own.get(key, 'missing')} here"
                )


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The finished checkpoints of a folder with their steps, the oldest first."""
    found = []
    for path in folder.glob("step-*.safetensors"):
        if match := re.fullmatch(r"step-(\d{8,})", path.stem):
            found.append((int(match[1]), path))
    return sorted(found)


def _remove(checkpoints: list[tuple[int, Path]], step: int, keep: int) -> None:
    """Remove those before `step` of which, with that of `step`, there are more than `keep`."""
    older = [path for number, path in checkpoints if number < step]
    for path in older[: len(older) + 1 - keep]:
        try:
            path.unlink()
        except OSError as error:
            logger.warning("cannot remove the old checkpoint %s: %s", path, error.strerror)
