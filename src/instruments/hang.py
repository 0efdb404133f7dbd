"""Ranks that hang, and torch's debug server photographed through a forwarded port.

    python -m instruments.hang PICTURE

Needs the packages jinja2, aiohttp, py-spy and playwright, and chromium.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server

STEPS = 3
SECONDS = 120.0


def load_batch(step: int) -> torch.Tensor:
    """Rank 1's disk does not answer after some steps."""
    if step == STEPS and dist.get_rank() == 1:
        time.sleep(10 * SECONDS)
    return torch.ones(1000)


def train_step(batch: torch.Tensor) -> None:
    dist.all_reduce(batch)


def train() -> None:
    dist.init_process_group("gloo")
    start_debug_server(port=int(os.environ["DEBUG_PORT"]))
    for step in range(STEPS + 1):
        train_step(load_batch(step))


@contextmanager
def hanging(port: int) -> Iterator[None]:
    """Three ranks that hang; rank 0 serves at this port."""
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=3", __file__]
    with tempfile.TemporaryFile() as printed:
        launcher = subprocess.Popen(
            [sys.executable, "-m", *launch],
            env={**os.environ, "DEBUG_PORT": str(port)},
            stdout=printed,
            stderr=printed,
        )
        try:
            yield
        finally:
            launcher.terminate()
            launcher.wait()


def read(url: str) -> str:
    """What is there, as soon as somebody answers."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with urlopen(url, timeout=SECONDS) as answer:
                return str(answer.read().decode())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def forward(port: int, to: int) -> None:
    """Until this process ends, connect who comes to one port to the other."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async def connect(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("localhost", to)
        await asyncio.gather(pump(source, back), pump(there, sink))

    async def serve() -> None:
        server = await asyncio.start_server(connect, "localhost", port)
        await server.serve_forever()

    Thread(target=lambda: asyncio.run(serve()), daemon=True).start()


def photograph(url: str, file: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 720, "height": 600})
        page.goto(url)
        page.locator("section").screenshot(path=file)
        browser.close()


def main() -> None:
    with hanging(port=25999):
        read("http://localhost:25999/")
        forward(26999, to=25999)
        time.sleep(10)  # for all ranks to come to the place where they hang
        photograph("http://localhost:26999/pyspy_dump", Path(sys.argv[1]))


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
