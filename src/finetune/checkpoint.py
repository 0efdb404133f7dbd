"""Checkpoints: saved whole or not at all, continued bit for bit.

    path = latest("checkpoints")
    step = load(path, {"model": model, "sampler": sampler}) if path else 0
    ...
    save("checkpoints", step, {"model": model, "sampler": sampler})

Rank 0 saves what is alike on every rank, and every rank's random state, in one
file: tensors as safetensors, the rest as JSON in the header, beside a SHA-256.
All ranks call these functions, and an error of one is raised on all. On a GPU,
"bit for bit" needs `torch.use_deterministic_algorithms(True)`.
"""

import fcntl
import functools
import itertools
import logging
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from finetune.job import check_alike, succeed_together
from finetune.state_file import CheckpointError, read_state, write_state
from miniddp.process import check_group

LOCK = ".lock"  # a file: NFS locks no folder for other machines
logger = logging.getLogger(__name__)


def save(
    folder: str | Path,
    step: int,
    objects: Mapping[str, Any],
    keep: int | None = None,
) -> Path:
    """Write `folder/step-<step>.safetensors`; leave `keep` of those up to it.

    `objects` maps names to objects with a `state_dict()`, or to states. Pass
    the module, not its wrapper; of a `FullyShardedModule` what
    `full_state_dict()` gives, which every rank calls.

    Raises `CheckpointError` if that fails, such as on a full disk: those that
    were there before are then whole.
    """
    check_group()
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step must be >= 0 and keep >= 1: {step}, {keep}")
    path = Path(folder) / f"step-{step:08d}.safetensors"
    ranks = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(random_state(), ranks)

    def write() -> None:
        if dist.get_rank() != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        shared = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in objects.items()
        }
        state = {"step": step, "shared": shared, "random_states": ranks}
        write_state(path, state)
        if keep is not None:
            remove_old(path, keep)

    where = f"cannot save step {step} in {folder}: "
    succeed_together(write, CheckpointError, where)
    return path


def load(path: str | Path, objects: Mapping[str, Any], elastic: bool = False) -> int:
    """Restore the objects from a file, in order; returns the step.

    Every rank's random state is restored too. Give a `DataLoader` a `generator`
    of its own: else a resume within an epoch draws one random number more. On
    another number of ranks only an `elastic` resume goes on, and random
    numbers begin anew.

    Raises `CheckpointError` for a file that is missing, foreign, damaged, not
    the same on all ranks, of another number of ranks or kind of device, and for
    a state that does not fit.
    """
    check_group()
    read = functools.partial(read_state, Path(path))
    state, digest = succeed_together(read, CheckpointError)
    check_alike({"SHA-256 of the checkpoint": digest}, CheckpointError)

    def restore() -> int:
        if not isinstance(state, dict) or "random_states" not in state:
            raise ValueError("it is no checkpoint of a training")
        before, now = len(state["random_states"]), dist.get_world_size()
        if before != now and not elastic:
            what = f"saved on {before} ranks, now there are {now}"
            raise ValueError(f"{what}: only an elastic resume goes on")
        numbers = state["random_states"][min(before - 1, dist.get_rank())]
        if (numbers[-1] is None) == torch.cuda.is_available():
            raise ValueError("its random states are not of a device like this")
        if missing := objects.keys() - state["shared"].keys():
            raise ValueError(f"no {min(missing)!r} in it")
        for name, target in objects.items():
            target.load_state_dict(state["shared"][name])
        if before == now:
            set_random_state(numbers)
        else:
            text = "saved on %d ranks, now there are %d: new random numbers"
            logger.info(text, before, now)
        return int(state["step"])

    where = f"cannot load {path}: "
    return succeed_together(restore, CheckpointError, where)


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


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint that every rank can read; None if no rank has any.

    One that a rank cannot read is named in a warning, and the one before it is
    taken. `CheckpointError` if none is left: else training would begin anew.
    """
    check_group()
    found = [_checkpoints(Path(folder))] * dist.get_world_size()
    dist.all_gather_object(found, found[0])
    problem = None
    for path in sorted({*itertools.chain(*found)}, key=_step, reverse=True):
        try:
            read = functools.partial(read_state, path)
            succeed_together(read, CheckpointError)
            return path
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)
            problem = problem or error
    if problem:
        what = f"no checkpoint in {folder} that every rank can read"
        raise CheckpointError(f"{what}: {problem}")
    return None


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


def _checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints, the oldest first."""
    found = folder.glob("step-*.safetensors")
    return sorted((p for p in found if p.stem[5:].isdecimal()), key=_step)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def remove_old(newest: Path, keep: int) -> None:
    """Leave `keep` of the checkpoints up to `newest`."""
    found = _checkpoints(newest.parent)
    files = [path for path in found if _step(path) <= _step(newest)]
    for path in files[:-keep]:
        try:
            path.unlink()
        except OSError as error:
            reason = error.strerror
            logger.warning("cannot remove the old %s: %s", path, reason)
