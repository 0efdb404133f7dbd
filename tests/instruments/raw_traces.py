"""The raw traces that others published: beside the project, or where TRACES_DIR says."""

import os
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("TRACES_DIR", ROOT.parent / "shared/data/traces"))

RESNET = "hta-resnet50-ddp-2xa100/nccl_data.json.gz"
PER_PARAMETER = "hta-naive-2xv100/df_index_resolver.json.gz"
DLRM = "dlrm-8xv100-kineto/dlrm_kineto.tar.gz"


def raw(name: str) -> Path:
    """The file; where it is not, the test is skipped."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no raw trace {path}: measurements/traces/sources.toml has its address")
    return path


def raw_ranks(folder: Path) -> list[Path]:
    """The traces of the eight ranks of DLRM, unpacked into the folder."""
    with tarfile.open(raw(DLRM)) as archive:
        archive.extractall(folder, filter="data")
    return sorted(folder.rglob("*.json"))
