"""The runbook's batch script on a SLURM of two nodes, where this machine can be one."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from instruments import cluster
from instruments.batch_job import WITH_SPARE, BatchJob, batch_script, changed
from instruments.cluster import Cluster, NoClusterError, missing, slurm, wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = batch_script(ROOT / "appendix/runbook.qmd")
PROGRAM = (ROOT / "runs/preemptible.py").read_text(encoding="utf-8")

needs_slurm = pytest.mark.skipif(bool(missing()), reason=f"no cluster here: {missing()}")


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    with slurm(2) as two_nodes:
        yield two_nodes


def job_on(two_nodes: Cluster, steps: int) -> BatchJob:
    return BatchJob(two_nodes, SCRIPT, changed(PROGRAM, {"= 400, 100, 10": f"= {steps}, 20, 10"}))


@needs_slurm
def test_a_command_runs_on_both_nodes_and_the_end_leaves_nothing() -> None:
    with slurm(2) as both:
        assert sorted(both.ask("srun", "-Q", "-N2", "hostname").split()) == ["node0", "node1"]
        holder = both.holder
    assert not both.folder.exists()
    assert not Path(f"/proc/{holder}").exists()


@needs_slurm
def test_a_part_that_does_not_come_up_is_named() -> None:
    with (
        pytest.raises(
            NoClusterError, match=r"munged has ended with exit code 1(?s:.*)Keyfile must be"
        ),
        slurm(2, key=b"short"),
    ):
        pass


@needs_slurm
def test_a_node_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SECONDS_TO_START", 3.0)
    monkeypatch.setattr(
        Cluster,
        "start_node",
        lambda self, name: self.nodes.update({name: self.start("sleep", "60")}),
    )
    with pytest.raises(NoClusterError, match="node0 has not come up after 3 s"), slurm(2):
        pass


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "munged" else name)
    with pytest.raises(NoClusterError, match="not installed: munged"), slurm(2):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoClusterError, match="only root"), slurm(2):
        pass


@needs_slurm
@pytest.mark.timeout(600)  # half a minute where nothing else runs
def test_a_job_that_is_signalled_goes_on_with_the_bits_of_an_undisturbed_one(
    two_nodes: Cluster,
) -> None:
    job = job_on(two_nodes, steps=800)
    number = job.submit()
    job.until_saved()
    two_nodes.ask("scancel", "--batch", "--signal=USR1", str(number))  # as the limit's B:USR1
    assert job.until(number, "PENDING", "COMPLETED")["JobState"] == "PENDING", job.said()
    left = job.step()
    assert 0 < left < 800
    finished = job.until(number, "COMPLETED")
    assert finished["Restarts"] == "1"
    assert (job.folder / "done").exists()
    assert f"step {left} of 800" in job.said()
    resumed = job.weights()

    shutil.rmtree(job.folder)
    job.until(job.submit(), "COMPLETED")
    assert torch.equal(job.weights(), resumed)
    wait_for(lambda: cluster.is_idle(two_nodes, "node1"), "node1 is not free", 20)


@needs_slurm
@pytest.mark.timeout(600)
def test_a_spare_that_fails_at_the_end_stops_neither_the_queue_nor_the_end() -> None:
    with slurm(3) as three_nodes:
        job = job_on(three_nodes, steps=800)
        number = job.submit(changes=WITH_SPARE)
        job.until_saved()
        three_nodes.ask("scancel", "--batch", "--signal=USR1", str(number))
        finished = job.until(number, "COMPLETED", "FAILED")
        assert (finished["JobState"], finished["Restarts"]) == ("COMPLETED", "1"), job.said()
        assert job.step() == 800
