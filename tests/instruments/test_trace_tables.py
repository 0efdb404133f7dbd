"""The tables of published traces are what the raw files give; what the pages say of them."""

import re
import tomllib

import pytest

from instruments.tensors import MODELS
from instruments.trace_tables import MAKERS, TABLES, digest, raw_files, read, sources, table
from miniddp.bucket import MIB, plan_buckets

from .raw_traces import FOLDER


def test_every_table_has_a_source_and_a_maker():
    tables = {path.stem for path in TABLES.glob("*.csv")}
    assert tables == set(sources()) == set(MAKERS)


def test_every_column_is_explained_and_stands_in_a_table():
    text = (TABLES / "sources.toml").read_text(encoding="utf-8")
    used = {column for name in MAKERS for column in read(name)[0]}
    assert set(tomllib.loads(text)["columns"]) == used


def test_the_extension_can_read_the_sources():
    """It reads sections, comments and one quoted string per line, nothing else of TOML."""
    line = re.compile(r"(#.*|\[\w+\]|\w+ = \"[^\"\\]+\"|)")
    text = (TABLES / "sources.toml").read_text(encoding="utf-8")
    assert [one for one in text.splitlines() if not line.fullmatch(one)] == []


@pytest.mark.parametrize("name", MAKERS)
def test_a_table_is_what_its_raw_file_gives(name):
    files = raw_files(name, FOLDER)
    if not files:
        pytest.skip(f"no raw file in {FOLDER}: sources.toml has its address; or set TRACES_DIR")
    assert digest(files) == sources()[name]["sha256"]
    assert table(name, FOLDER) == (TABLES / f"{name}.csv").read_text(encoding="utf-8")


def messages_of(step, table="resnet50_2xa100_messages"):
    """The elements of the all-reduces that NCCL was handed in a step, in their order."""
    rows = read(table)
    return [
        int(row["elements"])
        for row in rows
        if row["step"] == step and row["collective"] == "all-reduce"
    ]


@pytest.mark.parametrize("step", ["4", "5", "6"])
def test_the_plan_is_what_torch_sent(step):
    elements = [parameter.elements for parameter in MODELS["resnet-50"].parameters]
    last_first = range(len(elements) - 1, -1, -1)
    plan = plan_buckets(
        num_bytes=[4 * number for number in elements],
        kinds=["float32"] * len(elements),
        order=last_first,
        cap_bytes=25 * MIB,
        first_cap_bytes=MIB,
    )
    planned = [sum(elements[i] for i in bucket) for bucket in plan]
    assert planned == messages_of(step)


def resnet18():
    """The elements of ResNet-18's parameters, in its order."""
    found = [3 * 64 * 49, 64, 64]
    width = 64
    for out in (64, 64, 128, 128, 256, 256, 512, 512):
        found += [9 * width * out, out, out, 9 * out * out, out, out]
        if out != width:
            found += [width * out, out, out]
        width = out
    return [*found, 1000 * width, 1000]


@pytest.mark.parametrize("step", ["15", "16", "17"])
def test_half_as_many_bytes_make_other_buckets_on_another_makers_gpu(step):
    elements = resnet18()
    last_first = range(len(elements) - 1, -1, -1)
    plans = {}
    for width in (2, 4):
        sizes = [width * number for number in elements]
        plan = plan_buckets(sizes, ["alike"] * len(sizes), last_first, 25 * MIB, MIB)
        plans[width] = [sum(elements[i] for i in bucket) for bucket in plan]
    assert plans[2] == messages_of(step, "resnet18_8xmi300_messages")
    assert len(plans[4]) == 3


def test_events_of_a_step_add_up_to_its_figures():
    """The table of events is all that the table of steps was computed from."""
    for events, steps, step in (
        ("resnet50_2xa100_events", "resnet50_2xa100_steps", "5"),
        ("compiled_2xv100_events", "compiled_2xv100_steps", "3"),
    ):
        [figures] = [row for row in read(steps) if row["step"] == step]
        rows = [row for row in read(events) if row["row"].startswith("stream")]
        begin = min(float(row["start_us"]) for row in rows)
        end = max(float(row["start_us"]) + float(row["duration_us"]) for row in rows)
        assert (end - begin) / 1e3 == pytest.approx(float(figures["span_ms"]), abs=0.006)


def test_four_hundred_messages_follow_all_gradients():
    """No kernel of the compute stream runs beside one of them."""
    rows = read("compiled_2xv100_events")
    messages = [row for row in rows if row["kind"] == "all-reduce"]
    assert len(messages) == 404
    [figures] = [row for row in read("compiled_2xv100_steps") if row["step"] == "3"]
    assert float(figures["hidden_ms"]) == 0


def test_eight_ranks_end_together():
    """The last to come has the shortest kernel, and all end within 7 µs."""
    rows = read("dlrm_8xv100_collectives")
    for number in {row["number"] for row in rows}:
        ranks = [row for row in rows if row["number"] == number]
        assert len(ranks) == 8
        ends = [float(row["start_us"]) + float(row["duration_us"]) for row in ranks]
        assert max(ends) - min(ends) <= 7
        last = max(ranks, key=lambda row: float(row["start_us"]))
        shortest = min(ranks, key=lambda row: float(row["duration_us"]))
        assert last["rank"] == shortest["rank"]


def test_the_ranks_that_hang_have_sent_nothing():
    """The two that the log of the injected fault names, and no other."""
    silent = [row["rank"] for row in read("hang_16_ranks") if row["pending"] == "0"]
    assert silent == ["9", "14"]
