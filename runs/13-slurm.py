# %% [markdown]
# # The batch script on a real SLURM
#
# SLURM with a controller and two or three nodes on one computer (`instruments.cluster`). The batch
# script and the program that it starts are the runbook's, with other sizes: one rank on each node,
# a shorter limit, more steps. Each fault has a cluster of its own.

# %% name="setup"
import subprocess
import time
from pathlib import Path

from book import provenance, record, table
from instruments.batch_job import WITH_SPARE, BatchJob, batch_script, changed
from instruments.cluster import Cluster, slurm, wait_for

provenance(device="cpu", world_size=2, backend="gloo")
print(subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.strip())
SCRIPT = batch_script(Path("appendix/runbook.qmd"))
PROGRAM = Path("runs/preemptible.py").read_text(encoding="utf-8")


def job_on(cluster: Cluster, steps: int = 10**6) -> BatchJob:
    program = changed(PROGRAM, {"= 400, 100, 10": f"= {steps}, 50, 10"})
    return BatchJob(cluster, SCRIPT, program)


# %% [markdown]
# ## The signal before the limit, and the queue
#
# A limit of two minutes, and a signal a minute before it. A requeued job waits for two minutes, as
# on a cluster that has not set another time.

# %% name="limit"
with slurm(2, wait_to_requeue=120) as cluster:
    job = job_on(cluster)
    shorter = {"--time=00:30:00": "--time=00:02:00", "USR1@300": "USR1@60"}
    number = job.submit(changes=shorter)
    job.until(number, "RUNNING")
    began = time.monotonic()
    wait_for(lambda: (job.folder / "leave").exists(), "no signal", 180)
    until_signal = time.monotonic() - began
    job.until(number, "PENDING")
    requeued = time.monotonic()
    wait_for(lambda: cluster.job(number)["Reason"] == "BeginTime", "no reason", 60)
    left = job.step()
    print(cluster.ask("squeue", "--format=%.5i %.9P %.12j %.2t %.5D %R"))
    job.until(number, "RUNNING")
    waited = time.monotonic() - requeued
    job.until_saved()
    assert job.step() > left
    print(job.said())
assert until_signal < 61
assert 100 < waited < 200
record(until_signal=round(until_signal), requeue_wait=round(waited))

# %% [markdown]
# ## What else happens to a job
#
# Here a requeued job waits for five seconds, and a node that says nothing counts as lost after ten.


# %% name="faults"
def preempted(cluster: Cluster, job: BatchJob) -> str:
    """By a job of higher priority, where the partition queues it again."""
    number = job.submit("--partition=train")
    job.until_saved()
    urgent = cluster.submit(URGENT)
    job.until(urgent, "COMPLETED")
    job.until(number, "RUNNING")
    left = job.step()
    job.until_saved()
    assert job.step() > left >= 50
    return f"saves, leaves, is queued again (restarts: {cluster.job(number)['Restarts']}), goes on"


def preempted_for_good(cluster: Cluster, job: BatchJob) -> str:
    """The same, where the partition cancels it, after a grace of 15 seconds."""
    number = job.submit("--partition=cheap")
    job.until_saved()
    urgent = cluster.submit(URGENT)
    job.until(urgent, "COMPLETED")
    assert f"step {job.step()} of" in job.said(), "it has left"
    assert cluster.job(number)["Restarts"] == "0"
    return "saves, leaves, is not queued again"


def cancelled(cluster: Cluster, job: BatchJob) -> str:
    number = job.submit()
    job.until_saved()
    cluster.ask("scancel", str(number))
    job.until(number, "CANCELLED")
    wait_for(lambda: f"step {job.step()} of" in job.said(), "it has not left", 60)
    assert cluster.job(number)["Restarts"] == "0"
    return "saves, leaves, is not queued again"


def node_dies(cluster: Cluster, job: BatchJob) -> str:
    number = job.submit()
    job.until_saved()
    left = job.step()
    cluster.kill_node("node1")
    killed = time.monotonic()
    wait_for(lambda: cluster.job(number)["Restarts"] == "1", "not queued again", 120)
    seconds = time.monotonic() - killed
    nodes = job.until(number, "RUNNING")["NodeList"]
    job.until_saved()
    assert job.step() > left
    return f"is queued again after {seconds:.0f} s, goes on on {nodes}"


def trains(cluster: Cluster, number: int, node: str) -> bool:
    """Whether the node has a rank beside its launcher."""
    there = (f"--jobid={number}", "--overlap", "--nodes=1", f"--nodelist={node}")
    return cluster.ask("srun", *there, "pgrep", "-fc", "[p]reemptible.py") == "2"


def spare_takes_over(cluster: Cluster, job: BatchJob) -> str:
    number = job.submit(changes=WITH_SPARE)
    job.until_saved()
    lost, spare = sorted(["node1", "node2"], key=lambda node: not trains(cluster, number, node))
    cluster.kill_node(lost)
    killed = time.monotonic()
    wait_for(lambda: trains(cluster, number, spare), "the spare does not train", 180)
    seconds = time.monotonic() - killed
    job.until_saved()
    assert cluster.job(number)["Restarts"] == "0"
    (job.folder / "leave").touch()  # as the script does at the signal
    wait_for(lambda: cluster.job(number)["Restarts"] == "1", "not queued again", 120)
    return f"the spare takes its place after {seconds:.0f} s; told to leave, it is queued again"


def array_of_jobs(cluster: Cluster, job: BatchJob) -> str:
    requeue = 'scontrol requeue "$SLURM_JOB_ID"\n'
    number = job.submit("--array=1-2%1", changes={requeue: ""})
    job.until_saved()
    (job.folder / "leave").touch()  # as the script does at the signal
    job.until(f"{number}_1", "COMPLETED")
    left = job.step()
    job.until(f"{number}_2", "RUNNING")
    job.until_saved()
    assert job.step() > left
    return "saves, leaves; the next of them goes on"


def rank_always_fails(cluster: Cluster, job: BatchJob) -> str:
    program = cluster.home / "runs/preemptible.py"
    failing = {"    leaving = False\n": "    raise ValueError('at the first step')\n"}
    program.write_text(changed(program.read_text(), failing))
    failed = job.until(job.submit(), "FAILED")
    assert failed["Restarts"] == "0"
    attempts = job.printed().count("ValueError: at the first step") // 2  # of two ranks
    return f"is started {attempts} times, then ends: {failed['Reason']}"


def folder_taken(cluster: Cluster, job: BatchJob) -> str:
    one_node = {"--nodes=2": "--nodes=1"}
    first = job.submit(changes=one_node)
    job.until_saved()
    second = job.submit(changes=one_node)
    failed = job.until(second, "FAILED")
    assert cluster.job(first)["JobState"] == "RUNNING"
    times = job.said().count("another job trains in build/slurm")
    return f"the second is refused, {times} times, and ends: {failed['Reason']}"


def left_out(cluster: Cluster, job: BatchJob) -> str:
    number = job.submit("--exclude=node0")
    nodes = job.until(number, "RUNNING")["NodeList"]
    assert nodes == "node[1-2]"
    return f"trains on {nodes}"


URGENT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --cpus-per-task=8
#SBATCH --partition=urgent
sleep 3
"""
KINDS = {
    "preempted, `PreemptMode=REQUEUE`": (preempted, 2),
    "preempted, `PreemptMode=CANCEL`, `GraceTime=15`": (preempted_for_good, 2),
    "`scancel`": (cancelled, 2),
    "a node dies, a third is free": (node_dies, 3),
    "a node dies, the job has a spare and `--no-kill`": (spare_takes_over, 3),
    "`--array=1-2%1` in place of requeueing": (array_of_jobs, 2),
    "a rank fails in each attempt": (rank_always_fails, 2),
    "a second job wants the same folder": (folder_taken, 2),
    "`--exclude=node0` of three": (left_out, 3),
}
rows = []
words = {}
for kind, (happens, nodes) in KINDS.items():
    with slurm(nodes) as cluster:
        job = job_on(cluster)
        began = time.monotonic()
        outcome = happens(cluster, job)
        rows.append([kind, outcome, round(time.monotonic() - began)])
        words[kind] = job.said()
table(rows, columns=["what happens", "what the job does", "seconds in all"], align=["l", "l", "r"])

# %% name="words-preempted"
print(words["preempted, `PreemptMode=REQUEUE`"])

# %% name="words-node"
print(words["a node dies, a third is free"])
