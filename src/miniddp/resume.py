"""Checkpoints of a training run: when they are saved, and how a run goes on from one."""

import functools
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miniddp.agree import on_rank_0
from miniddp.checkpoint import latest, load, save
from miniddp.command_line import flag
from miniddp.options import Options, TrainingError
from miniddp.state_file import CheckpointError

KEPT = 2
"""How many checkpoints stay: one can be damaged."""

MAY_CHANGE = {
    *("data_dir", "epochs", "steps", "checkpoint", "checkpoint_every", "resume"),
    *("profile", "tensorboard"),
}
"""Options that a resumed run may choose anew. The others shape the steps that were taken."""

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and resumes one run, bit for bit.

    Args:
        options: of the run.
        shared: what goes into a checkpoint, by name; each with `state_dict`, `load_state_dict`.
        data_digest: tells whether a resumed run has the same data.
    """

    def __init__(self, options: Options, shared: Mapping[str, Any], data_digest: str) -> None:
        self.folder = options.checkpoint
        self.every = options.checkpoint_every
        self.wanted = options.resume
        self.shared = shared
        chosen = {name: value for name, value in asdict(options).items() if name not in MAY_CHANGE}
        self.identity = {**chosen, "data": data_digest}

    def restore(self, path: Path) -> int:
        """Goes on from a checkpoint; returns the number of steps before it.

        Raises:
            CheckpointError: on every rank, if it cannot be used, or is of a run with other options
                or data.
        """
        restored = load(path, self.shared)
        for name, value in self.identity.items():
            before = restored.extra.get(name)
            if name == "data" and value != before:
                raise CheckpointError(f"cannot resume {path}: it was saved with other data")
            if value != before:
                raise CheckpointError(
                    f"cannot resume {path}: it was saved with {flag(name)} {before}, not {value}"
                )
        logger.info("resumed after step %d from %s", restored.step, path)
        return restored.step

    def find(self) -> Path | None:
        """The checkpoint to resume; None to begin anew.

        Raises, on every rank:
            CheckpointError: there is none, or only damaged ones.
            TrainingError: nothing shall be resumed, but the folder for checkpoints has some.
        """
        if self.wanted is None:
            self._check_unused()
            return None
        if self.wanted == "auto":
            assert self.folder is not None
            path = latest(self.folder)
            if path is None:
                logger.info("no checkpoint in %s yet: training begins anew", self.folder)
            return path
        wanted = Path(self.wanted)
        if not on_rank_0(wanted.is_dir, CheckpointError):
            return wanted
        path = latest(wanted)
        if path is None:
            raise CheckpointError(f"cannot resume: there is no checkpoint in {wanted}")
        return path

    def _check_unused(self) -> None:
        if self.folder is not None and latest(self.folder) is not None:
            raise TrainingError(
                f"{self.folder} has checkpoints of another run: go on from them with "
                "--resume auto, or choose another folder"
            )

    def after(self, step: int, is_last: bool) -> None:
        """Saves after `step` steps, if it is time.

        Raises:
            CheckpointError: on every rank, if that fails. The checkpoints before are intact.
        """
        if self.folder is None:
            return
        if is_last or (self.every and step % self.every == 0):
            save(self.folder, step, self.shared, extra=self.identity, keep=KEPT)


def check_folders(options: Options) -> None:
    """Raises a TrainingError on every rank if rank 0 cannot write where it shall."""
    for name in ("checkpoint", "profile", "tensorboard"):
        folder = getattr(options, name)
        if folder is not None:
            prefix = f"{flag(name)}: cannot write into {folder}: "
            work = functools.partial(_try_to_write, Path(folder))
            on_rank_0(work, TrainingError, prefix=prefix)


def _try_to_write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0")
