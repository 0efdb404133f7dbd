"""The trace that readers open is what the simulator gives, and what run 11-step recorded of it."""

import itertools
import json
from pathlib import Path

import pytest

from instruments import step_trace
from instruments.trace import read_trace

ROOT = Path(__file__).parents[2]
FILE = ROOT / "vis/two-steps.trace.json"


def recorded(name: str) -> float:
    notebook = json.loads((ROOT / "recordings/11-step.cpu.ipynb").read_text())
    values: dict[str, float] = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            values |= output.get("data", {}).get("application/vnd.miniddp.values+json", {})
    return values[name]


def test_the_file_is_what_the_simulator_gives():
    again = "write it again: python -m instruments.step_trace > vis/two-steps.trace.json"
    assert FILE.read_text() == step_trace.trace() + "\n", again
    assert FILE.stat().st_size < 100_000


@pytest.mark.parametrize(
    ("process", "waits"), [("1", "naive_waits_ms"), ("2", "overlapped_waits_ms")]
)
def test_each_step_waits_as_recorded(process: str, waits: str):
    events = [each for each in read_trace(FILE).events if each.thread.startswith(process)]
    seconds = max(each.end for each in events)
    assert 1e3 * seconds == pytest.approx(recorded("alone_ms") + recorded(waits), abs=1e-3)


def test_it_says_that_it_is_computed():
    rows = json.loads(FILE.read_text())["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert len(names) == 2
    assert all(name.endswith("(computed)") for name in names)


def test_no_event_begins_before_the_last_one_of_its_thread_ends():
    """Perfetto leaves such events out."""
    rows = [row for row in json.loads(FILE.read_text())["traceEvents"] if row["ph"] == "X"]
    for _, alike in itertools.groupby(rows, key=lambda row: (row["pid"], row["tid"])):
        times = [(round(1e3 * row["ts"]), round(1e3 * row["dur"])) for row in alike]
        for (start, nanoseconds), (following, _) in itertools.pairwise(times):
            assert start + nanoseconds <= following
