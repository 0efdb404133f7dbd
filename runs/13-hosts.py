# %% [markdown]
# # Two hosts
#
# Two hosts on one machine: two network namespaces, and a cable of known bandwidth and delay
# between them (`runs/hosts.py`). First the time of a step beside what `instruments` computes from
# the cable and from a step without communication. Then the cable is pulled and hosts are lost.

# %% name="setup"
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import faults
import hosts
from book import provenance, record, table
from hosts import Cable, Hosts, two_hosts
from instruments.cost import Link, ring_all_reduce_seconds
from instruments.simulator import even_layers, simulate

provenance(device="cpu", world_size=2, backend="gloo")
here = Path("runs") if Path("runs/book.py").exists() else Path()

# %% [markdown]
# ## The time of a step
#
# 16 sequences of 64 tokens per rank. *One by one*: an all-reduce per parameter after backward
# (`SimpleDDP`). *Buckets*: `DistributedDataParallel`. The median of nine steps.


# %% name="measure"
def measure(cable: Cable) -> dict:
    """What `step_on_hosts.py` measures on two hosts."""
    static = ["--master_addr", hosts.address(0), "--master_port=29500"]
    script = str(here / "step_on_hosts.py")
    with two_hosts(cable) as both:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks = [both.start(h, f"--node_rank={h}", *static, script, **pipes) for h in (0, 1)]
        said = [rank.communicate(timeout=300) for rank in ranks]
    assert not any(rank.returncode for rank in ranks), said
    return json.loads(said[0][0].splitlines()[-1])


def computed(cable: Cable, found: dict) -> tuple[float, float]:
    """Seconds of a step one by one and in buckets: 2 messages for each all-reduce of 2 ranks."""
    link = Link(cable.delay, cable.seconds_per_byte)
    steps = []
    for sizes, overlapped in (
        (found["parameter_bytes"][::-1], False),
        (found["bucket_bytes"], True),
    ):
        layers = even_layers(sizes, found["forward"], found["alone"] - found["forward"])
        step = simulate(
            layers, lambda size: ring_all_reduce_seconds(size, 2, link), overlapped=overlapped
        )
        steps.append(step.seconds)
    return steps[0], steps[1]


CABLES = [(100, 0.1), (100, 5), (200, 0.1), (200, 5), (500, 0.1), (500, 5)]  # Mbit/s, ms
measured = {}
for mbit, ms in CABLES:
    cable = Cable(mbit * 1e6 / 8, ms * 1e-3)
    found = measure(cable)
    measured[mbit, ms] = found, computed(cable, found)

# %% name="steps"
rows = []
for (mbit, ms), (found, (simple, buckets)) in measured.items():
    times = found["simple"], simple, found["buckets"], buckets
    rows.append([mbit, ms, *(f"{1e3 * seconds:.0f}" for seconds in times)])
columns = ["Mbit/s", "delay, ms", "one by one", "computed", "buckets", "computed"]
table(rows, columns=columns)

# %% [markdown]
# ## A cable is pulled, a host is lost
#
# A training with `miniddp.train`, a launcher on each host, the folder for checkpoints on a disk that
# both see. Rank 0's host keeps torchrun's store.

# %% name="training"
STEPS, EVERY = 40, 4
CABLE = Cable(200e6 / 8, 0.5e-3)
OPTIONS = ["--model=tiny", "--epochs=20", f"--steps={STEPS}", "--batch-size=4", "--max-length=8"]
OPTIONS += [f"--checkpoint-every={EVERY}", "--resume=auto", "--timeout=20"]


class Training:
    """A folder that both hosts see, and the launchers that have been started."""

    def __init__(self, both: Hosts, home: Path) -> None:
        self.both, self.home, self.saved = both, home, home / "saved"
        self.launchers: dict[int, subprocess.Popen[str]] = {}

    def start(self, host: int) -> None:
        command = ["--max_restarts=3", "--rdzv_backend=c10d", "--rdzv_id=a"]
        command += [
            f"--rdzv_endpoint={hosts.address(0)}:29500",
            f"--local_addr={hosts.address(host)}",
        ]
        command += [f"--rdzv_conf=is_host={host == 0},join_timeout=60,read_timeout=20"]
        command += ["-m", "miniddp.train", f"--checkpoint={self.saved}", *OPTIONS]
        with (self.home / f"host-{host}").open("a") as log:
            self.launchers[host] = self.both.start(host, *command, stdout=log, stderr=log)

    def start_both(self) -> None:
        self.start(0)
        self.start(1)

    def reach(self, step: int) -> None:
        while not any((self.saved / faults.file(s)).exists() for s in range(step, STEPS + 1)):
            assert all(launcher.poll() is None for launcher in self.launchers.values()), self.text()
            time.sleep(0.05)

    def kill(self, host: int) -> None:
        """Without power: the launcher and its rank."""
        self.launchers[host].kill()
        self.launchers[host].wait()

    def codes(self) -> list[int]:
        """How the launchers end, however long that takes."""
        return [self.launchers[host].wait(timeout=300) for host in (0, 1)]

    def text(self, host: int | None = None) -> str:
        names = ["host-0", "host-1"] if host is None else [f"host-{host}"]
        return "".join((self.home / name).read_text() for name in names)

    def result(self) -> str:
        return faults.digest(self.saved / faults.file(STEPS))


def nothing(training: Training) -> str:
    training.start_both()
    assert training.codes() == [0, 0], training.text()
    return ""


def pulled_for_a_while(training: Training) -> str:
    training.start_both()
    training.reach(EVERY)
    training.both.pull()
    time.sleep(3)
    training.both.plug_in()
    assert training.codes() == [0, 0], training.text()
    assert "resumed after step" not in training.text()
    return "the ranks wait, and nothing else happens"


def pulled_for_good(training: Training) -> str:
    training.start_both()
    training.reach(EVERY)
    training.both.pull()
    start = time.monotonic()
    codes = training.codes()
    assert 0 not in codes, training.text()
    seconds = time.monotonic() - start
    training.both.plug_in()
    training.start_both()
    assert training.codes() == [0, 0], training.text()
    return f"both launchers end after {seconds:.0f} s; the same commands go on"


def host_killed(training: Training) -> str:
    training.start_both()
    training.reach(2 * EVERY)
    training.kill(1)
    training.start(1)
    assert training.codes() == [0, 0], training.text()
    assert "resumed after step" in training.text()
    return "the other launcher waits; the same command on a machine goes on"


def store_lost(training: Training) -> str:
    training.start_both()
    training.reach(2 * EVERY)
    training.kill(0)
    start = time.monotonic()
    assert training.launchers[1].wait(timeout=300) != 0
    seconds = time.monotonic() - start
    training.start_both()
    assert training.codes() == [0, 0], training.text()
    return f"the other launcher ends after {seconds:.0f} s; the same commands go on"


def run(fault: Callable[[Training], str]) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder, two_hosts(CABLE) as both:
        training = Training(both, Path(folder))
        try:
            happened = fault(training)
            return happened, training.result()
        finally:
            for launcher in training.launchers.values():
                launcher.kill()
                launcher.wait()


# %% name="faults"
KINDS = {
    "the cable is pulled for 3 s": pulled_for_a_while,
    "the cable is pulled for good": pulled_for_good,
    "host 1 loses its power": host_killed,
    "host 0, with the store, loses its power": store_lost,
}
_, undisturbed = run(nothing)
rows = []
for kind, fault in KINDS.items():
    happened, result = run(fault)
    rows.append([kind, happened, "yes" if result == undisturbed else "no"])
table(rows, columns=["fault", "what happens", "same bits at the end"], align=["l", "l", "l"])
assert all(row[-1] == "yes" for row in rows)
