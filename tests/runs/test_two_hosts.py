"""Two hosts on one machine: network namespaces, a cable between them, a torchrun on each."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import faults

STEPS, EVERY = 40, 4
NAMES, PORT = [f"miniddp-{os.getpid()}-{host}" for host in "ab"], 29_500


def ip(*arguments: str) -> str:
    """Run `ip`; returns why it cannot, or nothing."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or ("failed" if done.returncode else "")


def missing() -> str:
    """Why this machine cannot be two hosts, if so."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    reason = ip("netns", "add", NAMES[0]) or ip("link", "add", "md0", "type", "veth", "peer", "md1")
    ip("netns", "del", NAMES[0])
    ip("link", "del", "md0")
    return reason


reason = missing()
pytestmark = [
    pytest.mark.skipif(bool(reason), reason=f"no network namespaces here: {reason}"),
    pytest.mark.timeout(900),
]


@pytest.fixture
def hosts() -> Iterator[Sequence[str]]:
    """The names of two namespaces; host 0 is 10.99.0.1, host 1 is 10.99.0.2."""
    try:
        for name in NAMES:
            assert not ip("netns", "add", name)
            assert not ip("-n", name, "link", "set", "lo", "up")
        ends = ["cable", "netns", NAMES[0], "type", "veth", "peer", "name", "cable"]
        assert not ip("link", "add", *ends, "netns", NAMES[1])
        for number, name in enumerate(NAMES, start=1):
            assert not ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", "cable")
            assert not ip("-n", name, "link", "set", "cable", "up")
        yield NAMES
    finally:
        for name in NAMES:
            ip("netns", "del", name)


class Training:
    """A folder that both hosts see, and the torchruns that they have started."""

    def __init__(self, home: Path) -> None:
        self.home, self.saved = home, home / "saved"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, host: int) -> subprocess.Popen[bytes]:
        address = f"10.99.0.{host + 1}"
        command = ["ip", "netns", "exec", NAMES[host], sys.executable, "-m"]
        command += ["torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max_restarts=3"]
        command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=10.99.0.1:{PORT}", "--rdzv_id=a"]
        command += [f"--rdzv_conf=is_host={host == 0}"]
        command += [f"--local_addr={address}", "-m", "miniddp.train", "--model=tiny", "--epochs=20"]
        command += [f"--steps={STEPS}", "--batch-size=4", "--max-length=8", "--timeout=60"]
        command += [f"--checkpoint={self.saved}", f"--checkpoint-every={EVERY}", "--resume=auto"]
        environment = {**os.environ, **faults.ENVIRONMENT, "GLOO_SOCKET_IFNAME": "cable"}
        with (self.home / f"host-{host}").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.started.append(process)
        return process

    def reach(self, step: int) -> None:
        while not any((self.saved / faults.file(s)).exists() for s in range(step, STEPS + 1)):
            assert all(process.poll() is None for process in self.started), self.text
            time.sleep(0.05)

    @property
    def text(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.home.glob("host-*"))

    def end(self, *processes: subprocess.Popen[bytes]) -> str:
        for process in processes:
            assert process.wait() == 0, self.text[-4000:]
        return faults.digest(self.saved / faults.file(STEPS))


@contextlib.contextmanager
def training(home: Path) -> Iterator[Training]:
    home.mkdir()
    made = Training(home)
    try:
        yield made
    finally:
        for process in made.started:
            if process.poll() is None:
                process.kill()
            process.wait()


def cable(state: str) -> None:
    assert not ip("-n", NAMES[0], "link", "set", "cable", state)


def test_a_slow_cable_a_pulled_one_and_a_host_that_comes_back_give_the_same_weights(
    hosts, tmp_path
):
    with training(tmp_path / "straight") as made:
        expected = made.end(made.start(0), made.start(1))

    with training(tmp_path / "slow") as made:
        for name in hosts:
            shaped = ["tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", "200mbit"]
            subprocess.run(
                ["ip", "netns", "exec", name, *shaped, "burst", "64kb", "latency", "50ms"],
                check=True,
            )
        assert made.end(made.start(0), made.start(1)) == expected

    with training(tmp_path / "pulled") as made:
        processes = made.start(0), made.start(1)
        made.reach(EVERY)
        cable("down")
        time.sleep(3)
        cable("up")
        assert made.end(*processes) == expected
        assert "resumed after step" not in made.text

    with training(tmp_path / "killed") as made:
        first, second = made.start(0), made.start(1)
        made.reach(2 * EVERY)
        second.send_signal(signal.SIGKILL)
        second.wait()
        made.started.remove(second)
        assert made.end(first, made.start(1)) == expected
        assert "resumed after step" in made.text
