"""The runbook's batch script as a job of a SLURM cluster, with other sizes."""

import re
import time
from pathlib import Path

import torch

from instruments.cluster import Cluster, wait_for

SIZES = {
    "--nproc_per_node=gpu": "--nproc_per_node=1",
    "--gpus-per-node=8": "--gpus-per-node=1",
    "--cpus-per-task=96": "--cpus-per-task=4",
    "--time=24:00:00": "--time=00:30:00",
}
WITH_SPARE = {
    "--nodes=2": "--nodes=3\n#SBATCH --no-kill",
    'srun torchrun --nnodes="$SLURM_JOB_NUM_NODES"': "srun --no-kill torchrun --nnodes=2",
}
SECONDS = 240.0  # at most, for what takes a few where nothing else runs
TOLD = re.compile(r"slurmstepd|srun|step \d|another|not all|cannot|torch\S+Error")


def batch_script(page: Path) -> str:
    """The batch script that a page shows."""
    found = re.search(r"```bash\n(#!/bin/bash\n.*?)```", page.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"{page} shows no batch script")
    return found[1]


def changed(text: str, changes: dict[str, str]) -> str:
    """The text with new for old. `ValueError` if something old is not in it."""
    for old, new in changes.items():
        if old not in text:
            raise ValueError(f"not in the text: {old!r}")
        text = text.replace(old, new)
    return text


class BatchJob:
    """A folder on a cluster with the script and the program that it starts."""

    def __init__(self, cluster: Cluster, script: str, program: str) -> None:
        self.cluster = cluster
        self.script = changed(script, SIZES)
        self.folder = cluster.home / "build" / "slurm"
        self.checkpoint = self.folder / "checkpoint.pt"
        (cluster.home / "runs").mkdir()
        (cluster.home / "runs" / "preemptible.py").write_text(program)

    def submit(self, *options: str, changes: dict[str, str] | None = None) -> int:
        """Queue it; returns its number."""
        return self.cluster.submit(changed(self.script, changes or {}), *options)

    def until_saved(self) -> None:
        """Wait for a checkpoint that is newer than this call."""
        now = time.time()

        def saved() -> bool:
            return self.checkpoint.exists() and self.checkpoint.stat().st_mtime > now

        wait_for(saved, f"no checkpoint: {self.said()}", SECONDS)

    def until(self, number: int | str, *states: str) -> dict[str, str]:
        """What SLURM says of a job, or a part of an array, once it is in such a state."""

        def there() -> dict[str, str] | None:
            known = self.cluster.job(number)
            return known if known["JobState"] in states else None

        known = wait_for(there, f"job {number} is not {states}", SECONDS)
        assert known
        return known

    def step(self) -> int:
        """Of the checkpoint."""
        return int(torch.load(self.checkpoint, weights_only=True)["step"])

    def weights(self) -> torch.Tensor:
        """Of the checkpoint."""
        model: dict[str, torch.Tensor] = torch.load(self.checkpoint)["model"]
        return model["weight"]

    def printed(self) -> str:
        """All that its jobs have printed."""
        files = sorted(self.cluster.home.glob("slurm-*.out"))
        return "\n".join(file.read_text() for file in files)

    def said(self) -> str:
        """SLURM's lines of it, the program's own, and the last line of each error."""
        lines = [line for line in self.printed().splitlines() if TOLD.match(line)]
        text = "\n".join(lines).replace(f"{self.cluster.home}/", "")
        return re.sub(r"AT \S+T", "AT ", text)
