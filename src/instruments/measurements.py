"""Reads `measurements/`: what others measured and published.

A table is a CSV file; `sources.toml` says where each comes from, and in its section
`columns` what each column holds, with the unit in brackets. Values stand as their
source prints them: an empty cell was not published.
"""

import csv
import re
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "measurements"
NEEDED = (
    "title",
    "measured",
    "hardware",
    "software",
    "date",
    "authors",
    "address",
    "licence",
)
ALLOWED = {*NEEDED, "read", "path", "commit", "caveat"}
LONGEST = 300  # characters of an error
READ = ("original", "second-hand")

Row = dict[str, Any]


def sources(folder: Path = FOLDER) -> dict[str, dict[str, str]]:
    """Table → where it comes from: title, hardware, address and so on.

    Raises:
        ValueError: A table has no source, a source no table, or an entry lacks a part.
    """
    entries = _entries(folder)
    tables = {path.stem for path in folder.glob("*.csv")}
    if unexplained := sorted(tables - entries.keys()):
        raise ValueError(f"sources.toml: {unexplained[0]}.csv has no source")
    if missing := sorted(entries.keys() - tables):
        raise ValueError(f"sources.toml: [{missing[0]}] has no {missing[0]}.csv")
    for name, entry in entries.items():
        _check_source(name, entry)
    return entries


def headings(folder: Path = FOLDER) -> dict[str, str]:
    """Column → what it holds, such as "bus bandwidth (GB/s)"."""
    return _toml(folder)["columns"]


def unit(column: str, folder: Path = FOLDER) -> str | None:
    """The unit of a column, such as "GB/s"; None if it holds text.

    Raises:
        ValueError: `sources.toml` does not say what the column holds.
    """
    return _unit(column, headings(folder))


def read(table: str, folder: Path = FOLDER) -> list[Row]:
    """The rows of a table: column → a number where the column has a unit, else text.

    The name of a column says its unit too: `size_bytes`, `time_us` (microseconds),
    `busbw_gb_per_s` (10⁹ bytes per second). A cell that was not published is None.

    Raises:
        ValueError: There is no such table, it has no source, a cell is wrong, or a
            column of numbers has no unit.
    """
    known = sources(folder)
    if table not in known:
        there = ", ".join(known)
        raise ValueError(f"measurements: no table {table} (there are: {there})")
    try:
        with open(folder / f"{table}.csv", encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{table}.csv: {error}"[:LONGEST]) from None
    names = headings(folder)
    units = {column: _unit(column, names) for column in header}
    rows = []
    for number, cells in enumerate(lines, start=2):
        line = f"{table}.csv:{number}"
        if len(cells) != len(header):
            raise ValueError(
                f"{line}: expected {len(header)} cells, found {len(cells)}"
            )
        row = {}
        for column, cell in zip(header, cells, strict=True):
            row[column] = _value(cell, units[column], f"{line}: {column}")
        rows.append(row)
    for index, column in enumerate(header):
        if units[column] is None and _all_numbers([cells[index] for cells in lines]):
            raise ValueError(
                f"{table}.csv: {column} holds numbers, and sources.toml gives no unit"
            )
    return rows


def _unit(column: str, names: dict[str, str]) -> str | None:
    if column not in names:
        raise ValueError(f"sources.toml: [columns] does not name {column[:100]}")
    found = re.search(r"\(([^()]+)\)$", names[column])
    return found[1] if found else None


def _toml(folder: Path) -> dict[str, dict[str, str]]:
    try:
        found = tomllib.loads((folder / "sources.toml").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"sources.toml: {error}"[:LONGEST]) from None
    found.setdefault("columns", None)
    for name, section in found.items():
        if not _is_section_of_texts(section):
            raise ValueError(
                f"sources.toml: [{name}] must be a section of texts"[:LONGEST]
            )
    return found


def _is_section_of_texts(section: Any) -> bool:
    return isinstance(section, dict) and all(
        type(value) is str for value in section.values()
    )


def _entries(folder: Path) -> dict[str, dict[str, str]]:
    found = _toml(folder)
    return {name: entry for name, entry in found.items() if name != "columns"}


def _check_source(name: str, entry: dict[str, str]) -> None:
    section = f"sources.toml: [{name}]"
    if lacking := [key for key in NEEDED if not entry.get(key)]:
        raise ValueError(f"{section} has no {lacking[0]}")
    if unknown := sorted(entry.keys() - ALLOWED):
        raise ValueError(f"{section}: unknown key {unknown[0]}")
    if entry.get("read") not in READ:
        raise ValueError(f"{section}: read must be one of {', '.join(READ)}")
    if entry["read"] == "second-hand" and not entry.get("caveat"):
        raise ValueError(f"{section}: read second-hand, and no caveat says why")
    if not entry["address"].startswith("https://"):
        raise ValueError(f"{section}: address is not https://…: {entry['address']}")


def _all_numbers(cells: list[str]) -> bool:
    texts = [cell for cell in cells if cell]
    number = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?")
    return bool(texts) and all(number.fullmatch(text) for text in texts)


def _value(cell: str, unit: str | None, position: str) -> str | float | None:
    if not cell:
        return None
    if unit is None:
        return cell
    try:
        return int(cell) if cell.isdecimal() else float(cell)
    except ValueError:
        text = repr(cell)[:100]
        raise ValueError(f"{position}: not a number of {unit}: {text}") from None
