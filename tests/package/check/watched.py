"""Programs, watched: two ranks each, forked from a server that has imported torch."""

import json
import multiprocessing
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from miniddp.check import session
from miniddp.launch import RanksFailed, RanksTimedOut, run_ranks

HERE = Path(__file__).parent
RIGHT = sorted((HERE / "right").glob("*.py"))


def findings(script: Path, may_fail: bool = False) -> list[dict[str, Any]]:
    """What is found in a script on two ranks, in the order in which it is printed."""
    try:
        outputs = run_ranks(watch, 2, script, backend=None, timeout=60).outputs
    except (RanksFailed, RanksTimedOut) as failure:
        if not may_fail:
            raise
        outputs = failure.outputs
    lines = [line for output in outputs for line in output.splitlines()]
    assert not [line for line in lines if "gave up" in line]
    return [json.loads(line) for line in lines if line.startswith("{")]


def watch(rank: int, script: Path) -> None:
    fork_workers()
    keep_groups()
    options = session.Options(steps=30, epochs=None, as_json=True, verdict="/dev/null")
    watched = session.start(options)
    sys.path.insert(0, str(script.parent))
    has_failed = True
    try:
        watched.names = runpy.run_path(str(script), run_name="__main__")
        has_failed = False
    finally:
        watched.finish(has_failed)


def keep_groups() -> None:
    """A wrapper that outlives its group may hang where it ends: torch's fault over gloo."""
    kept = []
    destroy = dist.destroy_process_group

    def keep_and_destroy(group: Any = None) -> None:
        kept.append(group or dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = keep_and_destroy


def fork_workers() -> None:
    """As in a program that torchrun starts: a rank here would start them as it was itself."""
    multiprocessing.set_start_method("fork", force=True)


def written(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text((HERE / "prelude.py").read_text() + text, encoding="utf-8")
    return script
