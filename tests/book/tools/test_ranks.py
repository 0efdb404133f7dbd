"""Which cells of a run tools/ranks.py finds to have run ranks."""

from pathlib import Path

import pytest
from recorder import call, make_project

import digest
import ranks

ROOT = Path(ranks.__file__).parent.parent
SETUP = """# %% name="setup"
import miniddp
from instruments import programs
from miniddp.launch import run_ranks
rows = []
SIZES = [1, 2]

"""


def claims_of(folder: Path, cells: str) -> ranks.Claims:
    project = make_project(folder, **{"05-ring": SETUP + cells})
    for package in ("miniddp/launch", "instruments"):
        (project / "src" / package).mkdir(parents=True)
    launch = project / "src/miniddp/launch"
    (launch / "__init__.py").write_text("from miniddp.launch.ranks import run_ranks\n")
    (launch / "ranks.py").write_text("def run_ranks(fn, world_size): ...\n")
    (project / "src/miniddp/__init__.py").write_text("from miniddp.launch.ranks import run_ranks\n")
    program = 'TORCHRUN = ("-m", "torch.distributed.run")\n\n\ndef torchrun(n): return TORCHRUN\n'
    (project / "src/instruments/programs.py").write_text(program)
    (project / "src/instruments/__init__.py").write_text("")
    return ranks.of_runs(project)["05-ring"]


@pytest.mark.parametrize(
    ("first", "second", "shows_ranks"),
    [
        ("sums = run_ranks(print, 2)", "print(sums)", True),
        ("sums = miniddp.run_ranks(print, 2)", "largest = max(sums)\nprint(largest)", True),
        ("said = programs.torchrun(2)", "print(said)", True),
        ("def both(): return run_ranks(print, 2)", "print(both())", True),
        ("for n in SIZES: rows.append(run_ranks(print, n))", "print(rows)", True),
        ("sums = run_ranks(print, 2)", "sums = [1, 2]\nprint(sums)", False),
        ("sums = run_ranks(print, 2)", "print([sums for sums in SIZES])", False),
        ("sums = run_ranks(print, 2)", "print(max(SIZES))", False),
        ("for n in SIZES: print(run_ranks(print, n))", "print(rows)", False),
    ],
)
def test_a_cell_shows_what_ranks_gave_if_its_values_are_theirs(
    tmp_path, first, second, shows_ranks
):
    cells = f'# %% name="first"\n{first}\n\n# %% name="second"\n{second}\n'
    found = claims_of(tmp_path, cells)
    assert found["setup"] == "0"
    assert found["second"] == ("all" if shows_ranks else "0")


START = '# %% name="start"{}\nrun_ranks(print, 2)\n'


def test_a_marker_says_what_cannot_be_read(tmp_path):
    cells = '# %% name="logs" ranks="2 3"\nprint(open("log"))\n# %% name="f" badge="computed"\n1\n'
    found = claims_of(tmp_path, START.format("") + cells)
    assert found == {"setup": "0", "start": "all", "logs": "2 3", "f": "computed"}


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ('# %% name="a" ranks="2"\n1\n', '"a" claims ranks, and none started'),
        (START.format(' badge="computed"'), '"start" is computed, and starts ranks'),
    ],
)
def test_a_marker_that_the_run_does_not_bear_out_is_refused(tmp_path, cells, message):
    with pytest.raises(digest.DigestError, match=message):
        claims_of(tmp_path, cells)


@pytest.mark.parametrize(
    ("claims", "sizes", "problems"),
    [
        ({"a": "all", "b": "computed"}, [2], 0),
        ({"a": "2", "b": "1 4", "c": "0"}, [2, 4], 0),
        ({"a": "0"}, [1], 0),
        ({"a": "0"}, [2], 1),
        ({"a": "all", "b": "2", "c": "4"}, [2, 4], 1),
        ({"a": "3"}, [2], 2),
    ],
)
def test_claims_agree_with_provenance(claims, sizes, problems):
    assert len([*ranks.problems(claims, sizes)]) == problems


def test_a_run_that_claims_ranks_and_starts_none_is_not_recorded(tmp_path):
    text = '# %%\nfrom book import provenance\nprovenance("cpu", 2, "gloo")\n'
    project = make_project(tmp_path, **{"01-claims": text})
    code, _, err = call(project, "01-claims")
    assert code != 0
    assert "provenance() says 2 ranks, and no cell has run them" in err
    assert not list(project.glob("recordings/*.ipynb"))
