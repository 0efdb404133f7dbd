"""The timeline of memory that others published, and the formula beside it."""

import gzip
import json

import pytest

from instruments.memory import bytes_per_parameter, resnet50_activation_bytes
from instruments.memory_timeline import KINDS, MIB, read_timeline, steps
from instruments.tensors import MODELS
from instruments.trace_tables import read

PARAMETERS, ACTIVATIONS, GRADIENTS = (
    KINDS.index(kind) for kind in ("parameters", "activations", "gradients")
)
STEP = [
    [10, 2, 5, ACTIVATIONS],
    [20, 2, 7, GRADIENTS],
    [30, 4, -5, ACTIVATIONS],
    [40, 4, -7, GRADIENTS],
]


def write(path, changes):
    path.write_bytes(gzip.compress(json.dumps(changes).encode()))
    return path


def test_what_is_held_after_each_change(tmp_path):
    file = write(tmp_path / "t.raw.json.gz", [[-1, 1, 100, PARAMETERS], *STEP])
    moments = read_timeline(file)
    assert [moment.total for moment in moments] == [100, 105, 112, 107, 100]
    assert [round(1e9 * moment.time) for moment in moments] == [0, 0, 10, 20, 30]
    assert moments[2].held[PARAMETERS] == 100
    assert moments[2].held[GRADIENTS] == 7


def test_a_step_begins_when_the_gradients_are_gone(tmp_path):
    later = [[time + 100, action, size, kind] for time, action, size, kind in STEP]
    file = write(tmp_path / "t.raw.json.gz", STEP + later)
    [step] = steps(read_timeline(file))
    assert [moment.total for moment in step] == [0, 5, 12, 7]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"[1]", b"[[1, 2]]", b"\x1f\x8bcut", b"[[1,"])
def test_another_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"^expected a raw file of .*, not other\.json: .+$"):
        read_timeline(path)


def test_a_step_of_resnet_50_holds_what_the_formulas_say():
    """Momentum in float32, 32 images."""
    rows = read("resnet50_memory")
    most = max(float(row["activations_mib"]) for row in rows)
    assert resnet50_activation_bytes(32) / MIB == pytest.approx(most, rel=0.01)
    states = bytes_per_parameter("momentum").total * MODELS["resnet-50"].elements / MIB
    kept = max(float(row["parameters_mib"]) + float(row["momentum_mib"]) for row in rows)
    gradients = max(float(row["gradients_mib"]) for row in rows)
    assert kept + gradients == pytest.approx(states, rel=0.03)
