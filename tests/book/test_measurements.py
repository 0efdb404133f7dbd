"""The folder `measurements`: every table has a source, every column a meaning and a unit."""

from __future__ import annotations

import csv
import re
import shutil
from datetime import date

import pytest

from instruments import measurements

TABLES = sorted(path.stem for path in measurements.FOLDER.glob("*.csv"))


def header_of(table):
    with open(measurements.FOLDER / f"{table}.csv", encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


BANDWIDTHS = [
    table for table in TABLES if {"size_bytes", "algbw_gb_per_s"} <= set(header_of(table))
]


def test_every_table_has_a_source_and_the_reverse():
    assert sorted(measurements.sources()) == TABLES


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_whole(table):
    rows = measurements.read(table)
    assert rows
    for column in header_of(table):
        values = [row[column] for row in rows]
        assert any(value is not None for value in values), f"{column} is empty"
        numbers = [isinstance(value, int | float) for value in values if value is not None]
        assert all(numbers) or not any(numbers)


@pytest.mark.parametrize("table", BANDWIDTHS)
def test_bandwidths_and_times_agree(table):
    """Bandwidth is size / time, and bus bandwidth 2(N - 1)/N of it (nccl-tests, PERFORMANCE.md)."""
    for row in measurements.read(table):
        size, time, rate = row["size_bytes"], row.get("time_us"), row.get("algbw_gb_per_s")
        if time and rate:
            assert size / time / 1e3 == pytest.approx(rate, rel=0.01, abs=0.006), row
        if rate:
            factor = 2 * (row["gpus"] - 1) / row["gpus"]
            assert rate * factor == pytest.approx(row["busbw_gb_per_s"], rel=0.01, abs=0.016), row


def test_small_buckets_are_slower_by_what_the_seconds_say():
    """The source's baseline is not published; ddp_scaling_v100 is another run of the same."""
    default = {
        (row["model"], row["gpus"]): row["p95_s_per_iter"]
        for row in measurements.read("ddp_scaling_v100")
        if row["ddp"] == "yes"
    }
    for row in measurements.read("ddp_bucket_1_against_25_mb_v100"):
        baseline = row["p95_s_per_iter"] / (1 + row["p95_slower_percent"] / 100)
        assert baseline == pytest.approx(default[row["model"], row["gpus"]], rel=0.015), row


def test_every_named_column_stands_in_a_table():
    used = {column for table in TABLES for column in header_of(table)}
    named = set(measurements.headings())
    assert named == used


def test_the_extension_can_read_the_sources():
    """It reads sections, comments and one quoted string per line, nothing else of TOML."""
    line = re.compile(r"(#.*|\[\w+\]|\w+ = \"[^\"\\]+\"|)")
    text = (measurements.FOLDER / "sources.toml").read_text(encoding="utf-8")
    for number, one in enumerate(text.splitlines(), start=1):
        assert line.fullmatch(one), f"sources.toml:{number}: {one}"


def test_dates_are_not_in_the_future():
    for table, source in measurements.sources().items():
        years = [int(year) for year in re.findall(r"\b(20\d\d)\b", source["date"])]
        assert years, f"{table}: no year in {source['date']!r}"
        assert max(years) <= date.today().year


@pytest.fixture
def folder(tmp_path):
    """Two tables and their sources, to break."""
    for name in ("no_sync_t4", "gpt2_124m_step_time"):
        shutil.copy(measurements.FOLDER / f"{name}.csv", tmp_path)
    sections = (measurements.FOLDER / "sources.toml").read_text(encoding="utf-8").split("\n[")
    kept = [part for part in sections if re.match(r"(no_sync|gpt2_124m|columns)", part)]
    (tmp_path / "sources.toml").write_text("[" + "\n[".join(kept), encoding="utf-8")
    return tmp_path


def test_the_small_folder_is_right(folder):
    assert len(measurements.read("no_sync_t4", folder)) == 8


SOURCES, TABLE = "sources.toml", "no_sync_t4.csv"
WRONG = {
    "a table without source": (
        SOURCES,
        (r"\[no_sync_t4\][^\[]*", ""),
        "sources.toml: no_sync_t4.csv has no source",
    ),
    "a source without table": (
        SOURCES,
        (r"\[no_sync_t4\]", '[other]\ntitle = "x"\n[no_sync_t4]'),
        "sources.toml: [other] has no other.csv",
    ),
    "no address": (
        SOURCES,
        (r"address = .*accelerate/concept.*\n", ""),
        "sources.toml: [no_sync_t4] has no address",
    ),
    "an address that is none": (
        SOURCES,
        (r"https://huggingface", "huggingface"),
        "sources.toml: [no_sync_t4]: address is not https://…: huggingface",
    ),
    "an unknown key": (
        SOURCES,
        (r"\[no_sync_t4\]", '[no_sync_t4]\nauthor = "x"'),
        "sources.toml: [no_sync_t4]: unknown key author",
    ),
    "neither read first-hand nor second-hand": (
        SOURCES,
        (r'read = "second-hand"', 'read = "somewhere"'),
        "sources.toml: [gpt2_124m_step_time]: read must be one of original, second-hand",
    ),
    "a column that is not explained": (
        SOURCES,
        (r"\ns_per_batch = .*", ""),
        "sources.toml: [columns] does not name s_per_batch",
    ),
    "numbers without a unit": (
        SOURCES,
        (r"(\ns_per_batch = .*) \(s\)", r"\1"),
        "no_sync_t4.csv: s_per_batch holds numbers, and sources.toml gives no unit",
    ),
    "a cell that is no number": (
        TABLE,
        (r",0\.91,", ",fast,"),
        "no_sync_t4.csv:4: s_per_batch: not a number of s: 'fast'",
    ),
    "a cell too many": (
        TABLE,
        (r"2\.13", "2.13,2"),
        "no_sync_t4.csv:3: expected 8 cells, found 9",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(folder, case):
    name, (pattern, replacement), message = WRONG[case]
    text = (folder / name).read_text(encoding="utf-8")
    changed, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1
    (folder / name).write_text(changed, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        measurements.read("no_sync_t4", folder)
    assert "\n" not in str(error.value)


def test_an_unknown_table(folder):
    message = "no table no_sync (there are: no_sync_t4, gpt2_124m_step_time)"
    with pytest.raises(ValueError, match=re.escape(message)):
        measurements.read("no_sync", folder)
