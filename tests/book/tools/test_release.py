"""What says the version must say the same one."""

import re
from pathlib import Path

import yaml

import miniddp

ROOT = Path(__file__).resolve().parents[3]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    project = re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE)
    newest = re.search(r"^## (\S+) \((\S+)\)$", read("CHANGELOG.md"), re.MULTILINE)
    assert project is not None
    assert newest is not None
    assert {str(citation["version"]), project[1], newest[1]} == {miniddp.__version__}
    assert str(citation["date-released"]) == newest[2]


def test_the_oldest_torch_that_is_allowed_is_tested() -> None:
    oldest = re.search(r'"torch>=([\d.]+)"', read("pyproject.toml"))
    assert oldest is not None
    jobs = yaml.safe_load(read(".github/workflows/test.yml"))["jobs"]
    assert jobs["package"]["strategy"]["matrix"]["torch"] == [f"torch=={oldest[1]}.0", "torch"]
