"""What depends on the page, the repository and the recording's provenance."""

from __future__ import annotations

import json
import re

import pytest

PAGE = "chapters/05-ring.qmd"


def badge(html: str) -> str:
    return re.search(r'<div class="provenance[^>]*>\s*<a [^>]*>(.*?)</a>', html)[1]


@pytest.mark.parametrize(("words", "minutes"), [(0, 1), (200, 1), (201, 2), (1000, 5)])
def test_reading_time_counts_words_of_prose(render, words, minutes):
    code = "\n\n```python\nnot counted at all\n```\n"
    done = render(PAGE, " ".join(["word"] * words) + code)
    assert f'<div class="reading-time">\n{minutes} min read\n</div>' in done.stdout


def test_reading_time_stands_under_the_title(render):
    html = render(PAGE, "# The ring\n\nText.\n").stdout
    assert html.index("</h1>") < html.index("min read") < html.index("Text.")


def test_quote_without_a_repository_has_no_link(render, book):
    (book / "_quarto.yml").write_text("project:\n  type: book\n", encoding="utf-8")
    html = render(PAGE, '::: {.code symbol="miniddp:VERSION"}\n:::\n').stdout
    assert '<div class="code-file">\nsrc/miniddp/__init__.py\n</div>' in html


def test_source_with_windows_line_ends(render, book):
    path = book / "src/miniddp/ring.py"
    note = "`size = len(tensor) // parts  # rounded down`\n: A note."
    page = f'::: {{.code symbol="miniddp.ring:split"}}\n{note}\n:::\n'
    unix = render(PAGE, page).stdout
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert render(PAGE, page).stdout == unix


PROVENANCE = {
    "several GPUs, a rank each": (
        {"kind": "gpu", "device": "NVIDIA A100", "device_count": 4, "backend": ["nccl"]},
        "GPU recording · 4 × NVIDIA A100 · 2 and 4 ranks on 4 GPUs over nccl",
    ),
    "more ranks than GPUs": (
        {"kind": "gpu", "device": "NVIDIA A100", "device_count": 2},
        "GPU recording · 2 × NVIDIA A100 · 2 and 4 ranks sharing 2 GPUs over gloo",
    ),
    "one rank without a group": (
        {"world_size": [1], "backend": []},
        "CPU recording · 2-core AMD EPYC · 1 rank",
    ),
    "three sizes, two backends": (
        {"world_size": [2, 4, 8], "backend": ["gloo", "mpi"]},
        "CPU recording · 2-core AMD EPYC · 2, 4 and 8 ranks over gloo and mpi",
    ),
    "nothing known": (
        {"world_size": None, "backend": None, "device": None},
        "CPU recording · unknown device",
    ),
}


@pytest.mark.parametrize("case", PROVENANCE)
def test_badge(render, book, case):
    changes, expected = PROVENANCE[case]
    kind = changes.get("kind", "cpu")
    recording = json.loads((book / "runs/01-demo.cpu.ipynb").read_text(encoding="utf-8"))
    recording["metadata"]["miniddp"].update(changes)
    path = book / f"runs/03-missing.{kind}.ipynb"
    path.write_text(json.dumps(recording), encoding="utf-8")
    html = render(PAGE, '::: {.run name="03-missing" cell="hello"}\n:::\n').stdout
    assert badge(html) == f"{expected} · torch 2.13.0 · 2026-11-21 · commit abc1234"


def test_badge_of_a_recording_with_local_changes(render):
    html = render(PAGE, '::: {.run name="02-cpu" cell="hello"}\n:::\n').stdout
    assert badge(html).endswith("commit feedfac with local changes")


def test_without_a_status_file_nothing_is_stale(render, book):
    (book / "runs/status.json").unlink()
    html = render(PAGE, '::: {.run name="01-demo" cell="hello"}\n:::\n').stdout
    assert "stale" not in html
    assert "latest change" not in html
