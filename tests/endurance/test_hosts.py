"""Two hosts on one machine, where that is possible: the cable, and what travels over it."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from instruments import hosts
from instruments.hosts import MTU, Cable, Hosts, two_hosts
from shakespeare import build_language_model

FAST = Cable(bandwidth=1e9, delay=0.0)
LISTEN = f"""
import socket
inbox = socket.create_server(("{hosts.address(1)}", 5000))
print("listens", flush=True)
for _ in range(2):
    print(inbox.accept()[0].recv(100).decode(), flush=True)
"""
SEND = f"""
import contextlib, socket, sys
while True:
    with contextlib.suppress(OSError):  # of a machine too busy to say who has the address
        socket.create_connection(("{hosts.address(1)}", 5000)).sendall(sys.argv[1].encode())
        break
"""


@pytest.fixture
def both() -> Iterator[Hosts]:
    with contextlib.ExitStack() as held:
        try:
            both = held.enter_context(two_hosts(FAST))
        except RuntimeError as error:
            pytest.skip(f"this machine cannot be two hosts: {error}")
        yield both


def test_a_byte_of_a_message_takes_its_share_of_the_headers():
    cable = Cable(bandwidth=1e6, delay=1e-3)
    content = MTU - 20 - 32  # of IP and TCP; around them are 14 bytes of Ethernet
    assert cable.seconds_per_byte * content == pytest.approx((MTU + 14) / 1e6)


def test_a_message_arrives_and_one_that_meets_a_pulled_cable_waits(both):
    def on(host: int, *command: str, **options) -> subprocess.Popen[str]:
        start = ["ip", "netns", "exec", both.names[host], sys.executable, "-c"]
        return subprocess.Popen([*start, *command], text=True, **options)

    with on(1, LISTEN, stdout=subprocess.PIPE) as listener:
        assert listener.stdout.readline() == "listens\n"
        with on(0, SEND, "first"):
            assert listener.stdout.readline() == "first\n"
        both.pull()
        with on(0, SEND, "second") as sender:
            for waits in (listener, sender):
                with pytest.raises(subprocess.TimeoutExpired):
                    waits.wait(1)
            both.plug_in()
            assert listener.stdout.readline() == "second\n"


def test_a_rank_on_each_host_trains_over_the_cable(both, monkeypatch):
    monkeypatch.setenv("STEPS", "1")
    options = ["--master_addr", hosts.address(0), "--master_port=29500", "runs/step_on_hosts.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [both.start(host, f"--node_rank={host}", *options, **pipes) for host in (0, 1)]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = json.loads(said[0][0].splitlines()[-1])
    assert sum(found["bucket_bytes"]) == sum(found["parameter_bytes"])
    assert found["parameter_bytes"] == [4 * p.numel() for p in build_language_model().parameters()]


def test_what_this_machine_lacks_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(RuntimeError, match="ip: No such file or directory"), two_hosts(FAST):
        pass
