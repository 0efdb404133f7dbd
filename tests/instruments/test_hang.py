"""Torch's debug server answers while ranks hang, over Gloo and through a forwarded port."""

import re
import time

import pytest

from instruments import hang
from instruments.programs import free_port

pytest.importorskip("jinja2", reason="torch's debug server needs jinja2")
pytest.importorskip("aiohttp", reason="torch's debug server needs aiohttp")


@pytest.mark.timeout(600)  # a few seconds where nothing else runs
def test_the_rank_that_does_not_come_is_seen() -> None:
    port, forwarded = free_port(), free_port()
    with hang.hanging(port):
        hang.read(f"http://localhost:{port}/")
        hang.forward(forwarded, to=port)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            stacks = hang.read(f"http://localhost:{forwarded}/stacks").split("<h2>Rank")[1:]
            places = [re.findall("in (load_batch|all_reduce)", stack) for stack in stacks]
            if places == [["all_reduce"], ["load_batch"], ["all_reduce"]]:
                return
            time.sleep(1)
    pytest.fail(f"the ranks are in {places}")
