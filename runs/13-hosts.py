# %% [markdown]
# # Two hosts
#
# Two hosts on one machine: two network namespaces, and a cable of known bandwidth and delay
# between them (`instruments.hosts`). First the time of a step beside what `instruments` computes
# from the cable and from a step without communication. Then the cable is pulled and hosts are lost.

# %% name="setup"
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from book import provenance, table
from instruments import hosts
from instruments.cost import Link, ring_all_reduce_seconds
from instruments.hosts import Cable, Hosts, two_hosts
from instruments.launched_jobs import ENVIRONMENT, digest, file
from instruments.simulator import even_layers, simulate

provenance(device="cpu", world_size=2, backend="gloo")
os.environ.update(ENVIRONMENT)

# %% [markdown]
# ## The time of a step
#
# 16 sequences of 64 tokens per rank. *One by one*: an all-reduce per parameter after backward
# (`SimpleDDP`). *Buckets*: `DistributedDataParallel`. The median of nine steps.


# %% name="measure"
def measure(cable: Cable) -> dict:
    """What `step_on_hosts.py` measures on two hosts."""
    static = ["--master_addr", hosts.address(0), "--master_port=29500", "runs/step_on_hosts.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with two_hosts(cable) as both:
        ranks = [both.start(host, f"--node_rank={host}", *static, **pipes) for host in (0, 1)]
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
# A training with `finetune`, a launcher on each host, the folder for checkpoints on a disk
# that both see. Host 0 keeps torchrun's store. TCP sends 5 times again what nobody acknowledges,
# and then gives up: the 15 times that Linux has by default take a quarter of an hour.
#
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is set. Without it a launcher tells its address in the
# first rendezvous only, and a host that comes back waits for it in vain (torch 2.13).

# %% name="training"
STEPS = 40
EVERY = 4
CABLE = Cable(200e6 / 8, 0.5e-3)
REBOOT = 30  # seconds; for 15 the rendezvous still counts on a host that says nothing
OPTIONS = ["--model=tiny", "--epochs=20", f"--steps={STEPS}", "--batch-size=4", "--max-length=8"]
OPTIONS += [f"--checkpoint-every={EVERY}", "--resume=auto", "--timeout=20"]


class Training:
    """A folder that both hosts see, and the launchers that have been started."""

    def __init__(self, both: Hosts, home: Path) -> None:
        self.both = both
        self.home = home
        self.saved = home / "saved"
        self.launchers: dict[int, subprocess.Popen[str]] = {}

    def start(self, host: int) -> None:
        command = [
            "--max_restarts=3",
            "--rdzv_backend=c10d",
            "--rdzv_id=a",
            f"--rdzv_endpoint={hosts.address(0)}:29500",
            f"--local_addr={hosts.address(host)}",
            f"--rdzv_conf=is_host={host == 0},join_timeout=60",
        ]
        command += ["-m", "finetune", f"--checkpoint={self.saved}", *OPTIONS]
        with (self.home / f"host-{host}").open("a") as log:
            self.launchers[host] = self.both.start(host, *command, stdout=log, stderr=log)

    def train_to(self, step: int) -> None:
        """Both hosts train, up to this checkpoint."""
        self.start(0)
        self.start(1)
        while not any((self.saved / file(s)).exists() for s in range(step, STEPS + 1)):
            running = [launcher.poll() is None for launcher in self.launchers.values()]
            assert all(running), self.text()
            time.sleep(0.05)

    def lose(self, host: int) -> None:
        """Without power a host closes no connection."""
        self.both.pull()
        self.launchers[host].kill()
        self.launchers[host].wait()

    def ends(self, *on_hosts: int) -> float:
        """Seconds until the launchers there have ended, without success."""
        start = time.monotonic()
        codes = [self.launchers[host].wait(timeout=300) for host in on_hosts]
        assert 0 not in codes, self.text()
        return time.monotonic() - start

    def go_on(self, *on_hosts: int) -> None:
        """Start the same command there; all then ends well."""
        for host in on_hosts:
            self.start(host)
        codes = [launcher.wait(timeout=300) for launcher in self.launchers.values()]
        assert codes == [0, 0], self.text()

    def text(self) -> str:
        return "".join((self.home / f"host-{host}").read_text() for host in self.launchers)


def nothing(training: Training) -> str:
    training.go_on(0, 1)
    return "–"


def pulled_for_a_while(training: Training) -> str:
    training.train_to(EVERY)
    training.both.pull()
    time.sleep(3)
    training.both.plug_in()
    training.go_on()
    assert "resumed after step" not in training.text()
    return "the ranks wait, and go on"


def pulled_for_good(training: Training) -> str:
    training.train_to(EVERY)
    training.both.pull()
    seconds = training.ends(0, 1)
    training.both.plug_in()
    training.go_on(0, 1)
    return f"both launchers have ended after {seconds:.0f} s; the same commands go on"


def host_lost(training: Training) -> str:
    training.train_to(2 * EVERY)
    training.lose(1)
    time.sleep(REBOOT)
    training.both.plug_in()
    training.go_on(1)
    assert "resumed after step" in training.text()
    return "launcher 0 waits for the host, or for another one with this command"


def store_lost(training: Training) -> str:
    training.train_to(2 * EVERY)
    training.lose(0)
    seconds = training.ends(1)
    training.both.plug_in()
    training.go_on(0, 1)
    return f"launcher 1 has ended after {seconds:.0f} s; the same commands go on"


def run(fault: Callable[[Training], str]) -> tuple[str, str]:
    """What happens, and a digest of the last checkpoint."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(CABLE) as both:
        both.give_up_after(retries=5)
        training = Training(both, Path(folder))
        try:
            happened = fault(training)
            return happened, digest(training.saved / file(STEPS))
        finally:
            for launcher in training.launchers.values():
                launcher.kill()
                launcher.wait()


# %% name="faults"
KINDS = {
    "the cable is pulled for 3 s": pulled_for_a_while,
    "the cable is pulled for good": pulled_for_good,
    "host 1 loses its power, and is back": host_lost,
    "host 0, with the store, loses its power": store_lost,
}
_, undisturbed = run(nothing)
rows = []
for kind, fault in KINDS.items():
    happened, result = run(fault)
    rows.append([kind, happened, "yes" if result == undisturbed else "no"])
table(rows, columns=["fault", "what happens", "same bits at the end"], align=["l", "l", "l"])
assert all(row[-1] == "yes" for row in rows)
