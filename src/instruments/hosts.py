"""Two hosts on one machine: network namespaces, and a cable that this program carries frames over.

Needs Linux and the rights of root. Linux' own way to a slow cable (`tc`, netem) is not in every
kernel; so the ends of the cable are TAP devices, and a process for each direction holds every frame
back as long as the wire would.
"""

import collections
import fcntl
import multiprocessing
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from instruments.programs import TORCHRUN

TUNSETIFF = 0x400454CA  # these two are of linux/if_tun.h
TAP_WITHOUT_HEADER = 0x0002 | 0x1000
MTU = 9000  # bytes of a frame's content; fewer frames are less work for the cable
ETHERNET = 14  # bytes of the header around it
IP_AND_TCP = 20 + 32  # bytes of the headers within
AHEAD = 2e-3  # seconds for which frames may queue at the wire before TCP has to wait


@dataclass(frozen=True)
class Cable:
    """What a cable does: `bandwidth` bytes per second each way, `delay` seconds one way."""

    bandwidth: float
    delay: float

    @property
    def seconds_per_byte(self) -> float:
        """Of a TCP stream, whose frames have headers."""
        return (MTU + ETHERNET) / (MTU - IP_AND_TCP) / self.bandwidth


@dataclass
class Hosts:
    """Two namespaces, each with an end of the cable, which is its network device `cable`."""

    names: tuple[str, str]
    carriers: list[BaseProcess]

    def start(self, host: int, *torchrun: str, **options: Any) -> subprocess.Popen[str]:
        """Start a launcher on a host, with a rank of its own."""
        on_host = ("ip", "netns", "exec", self.names[host])
        launch = (sys.executable, *TORCHRUN, "--nnodes=2", "--nproc_per_node=1")
        return subprocess.Popen(
            [*on_host, *launch, *torchrun],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"},
            text=True,
            **options,
        )

    def pull(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._send(signal.SIGSTOP)

    def plug_in(self) -> None:
        self._send(signal.SIGCONT)

    def give_up_after(self, retries: int) -> None:
        """How often TCP sends again what nobody acknowledges: 15 times, 15 minutes, by default."""
        for name in self.names:
            setting = f"net.ipv4.tcp_retries2={retries}"
            subprocess.run(
                ["ip", "netns", "exec", name, "sysctl", "-qw", setting], check=True
            )

    def _send(self, number: int) -> None:
        for carrier in self.carriers:
            os.kill(carrier.pid or 0, number)


def address(host: int) -> str:
    return f"10.99.0.{host + 1}"


def ip(*arguments: str) -> None:
    """Run `ip`; `RuntimeError` with the reason if it cannot do it."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"ip: {error.strerror}") from error
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def two_hosts(cable: Cable) -> Iterator[Hosts]:
    """Two hosts, joined by `cable`. `RuntimeError` says why this machine cannot be two."""
    if sys.platform != "linux":
        raise RuntimeError("network namespaces are Linux's")
    names = (f"mini{os.getpid()}a", f"mini{os.getpid()}b")  # devices have short names
    carriers: list[BaseProcess] = []
    ends: list[int] = []  # file descriptors
    try:
        for host, name in enumerate(names):
            ip("netns", "add", name)
            ends.append(_tap(name))
            ip("link", "set", name, "netns", name)
            ip("-n", name, "link", "set", name, "name", "cable", "mtu", str(MTU))
            ip("-n", name, "address", "add", f"{address(host)}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        fork = multiprocessing.get_context("fork")
        for source, target in (ends, ends[::-1]):
            carrier = fork.Process(
                target=carry, args=(source, target, cable), daemon=True
            )
            carrier.start()
            carriers.append(carrier)
        yield Hosts(names, carriers)
    finally:
        for process in carriers:
            process.kill()
            process.join()
        for end in ends:
            os.close(end)
        for name in names:
            with suppress(RuntimeError):
                ip("netns", "del", name)


def _tap(name: str) -> int:
    try:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(
            end, TUNSETIFF, struct.pack("16sH", name.encode(), TAP_WITHOUT_HEADER)
        )
    except OSError as error:
        raise RuntimeError(f"/dev/net/tun: {error.strerror}") from error
    return end


def carry(source: int, target: int, cable: Cable) -> None:
    """Bring every frame from one end to the other, when a wire would."""
    under_way: collections.deque[tuple[float, bytes]] = collections.deque()
    free = 0.0  # when the wire has sent all that it was given
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, frame = under_way.popleft()
            os.write(target, frame)
        until_next = under_way[0][0] - now if under_way else 1.0
        if free - now > AHEAD:
            time.sleep(min(free - now - AHEAD, until_next))
            continue
        if select.select([source], [], [], max(0.0, until_next))[0]:
            frame = os.read(source, MTU + 100)
            free = max(free, time.monotonic()) + len(frame) / cable.bandwidth
            under_way.append((free + cable.delay, frame))
