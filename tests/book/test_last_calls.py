"""The runbook's program to copy reads what a job that was killed has left."""

import pickle
from pathlib import Path

import pytest

import last_calls

CALL = {
    "collective_seq_id": 7,
    "profiling_name": "nccl:all_reduce",
    "input_sizes": [[3]],
    "state": "started",
    "frames": [
        {"filename": "/lib/torch/distributed/x.py", "name": "all_reduce", "line": 1},
        {"filename": "/home/me/train.py", "name": "train_step", "line": 12},
    ],
}


@pytest.mark.parametrize("length", [0, 1, 40])
def test_a_file_that_is_cut_off_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    whole = pickle.dumps({"entries": [CALL]})
    (tmp_path / "rank_0").write_bytes(whole[:length])
    (tmp_path / "rank_1").write_bytes(whole)
    last_calls.main(tmp_path)
    cut, read = capsys.readouterr().out.splitlines()
    assert cut == "rank 0: ended while it wrote its calls"
    assert read == ("rank 1, call 7: nccl:all_reduce [[3]] started, in train_step, train.py:12")
