"""A snapshot of the allocator, small and by hand, and what is none."""

import gzip
import pickle
from pathlib import Path

import pytest

from instruments.memory_snapshot import main, read_snapshot

TENSOR = {"state": "active_allocated", "size": 1024, "requested_size": 1000}
GAP = {"state": "inactive", "size": 512, "requested_size": 0}
HELD = {
    "segments": [{"total_size": 2560, "allocated_size": 2048, "blocks": [TENSOR, TENSOR, GAP]}],
    "device_traces": [
        [
            {"action": "alloc", "size": 1024},
            {"action": "alloc", "size": 4096},
            {"action": "free_requested", "size": 4096},
            {"action": "free_completed", "size": 4096},
            {"action": "alloc", "size": 1024},
        ]
    ],
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_is_live_at_its_peak_and_free(tmp_path: Path, pack) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pack(pickle.dumps(HELD)))
    found = read_snapshot(path)
    assert (found.reserved, found.live, found.requested) == (2560, 2048, 2000)
    assert found.peak == 1024 + 4096, "before the second of the tensors that are live"
    assert found.tensors == {1000: 2}
    assert found.free == [512]


def test_a_report_names_the_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(HELD))
    main(path)
    assert "2 of      0.00 MiB" in capsys.readouterr().out


BAD = {
    "empty": b"",
    "text": b"hello",
    "another pickle": pickle.dumps([1, 2]),
    "code": pickle.dumps(print),
    "half packed": gzip.compress(pickle.dumps(HELD))[:40],
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_snapshot_gets_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(BAD[name])
    with pytest.raises(ValueError, match=r"expected a file of torch\.cuda\.memory") as error:
        read_snapshot(path)
    assert "\n" not in str(error.value)


def test_no_file_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not missing.pickle: .*No such file"):
        read_snapshot(tmp_path / "missing.pickle")
