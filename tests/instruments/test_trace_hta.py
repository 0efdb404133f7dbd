"""Our reader of GPU traces against HolisticTraceAnalysis, on the published traces.

It runs where HolisticTraceAnalysis is installed. `-s` prints the table of both readers.
"""

import json
import os

import pytest

from instruments.trace_figures import figures, idle_by_stream
from instruments.trace_gpu import read_devices

from .raw_traces import PER_PARAMETER, RESNET, raw, raw_ranks

pytest.importorskip("hta", reason="needs HolisticTraceAnalysis, in an environment of its own")

WITHIN = 0.01
ROUNDED = 2.0  # HolisticTraceAnalysis gives whole microseconds


def theirs(path, rank):
    """Their figures, in microseconds."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"  # else each kernel loses up to 2 µs
    from hta.trace_analysis import TraceAnalysis

    files = {rank: str(path)}
    analysis = TraceAnalysis(trace_files=files, trace_dir="", include_last_profiler_step=True)
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
    found = {
        "span": times["kernel_time(us)"],
        "compute": times["compute_time(us)"],
        "idle": times["idle_time(us)"],
        "hidden, % of messages": overlap["comp_comm_overlap_pctg"],
    }
    gaps, _ = analysis.get_idle_time_breakdown(ranks=[rank], visualize=False)
    for row in gaps.to_dict("records"):
        found[f"stream {row['stream']}, {row['idle_category']}"] = row["idle_time"]
    return found


def ours(path):
    [trace] = read_devices(path)
    whole = figures(trace.work)
    found = {
        "span": 1e6 * whole.span,
        "compute": 1e6 * whole.compute,
        "idle": 1e6 * whole.idle.total,
        "hidden, % of messages": 100 * whole.hidden / whole.communication,
    }
    for stream, idle in idle_by_stream(trace.work).items():
        for cause, seconds in idle._asdict().items():
            found[f"stream {stream}, {cause}"] = 1e6 * seconds
    return found


def compare(path, rank):
    expected = theirs(path, rank)
    found = ours(path)
    print(f"\n{path.name}")
    for name, value in expected.items():
        print(f"{name:28} theirs {value:14,.2f}  ours {found[name]:14,.2f}")
    for name, value in expected.items():
        # A share of theirs has two decimals, a time is in whole microseconds.
        absolute = 0.005 if "%" in name else ROUNDED
        assert found[name] == pytest.approx(value, rel=WITHIN, abs=absolute), name
    missing = {name for name in found if name not in expected and found[name] > ROUNDED}
    assert not missing


@pytest.mark.parametrize(("name", "rank"), [(RESNET, 0), (PER_PARAMETER, 1)])
def test_one_rank(name, rank):
    compare(raw(name), rank)


def without_unlaunched(path):
    """Without the kernels that were launched before the recording began.

    HolisticTraceAnalysis takes the first row of the file for their launch.
    """
    content = json.loads(path.read_text())
    rows = content["traceEvents"]
    launched = {
        row["args"]["correlation"]
        for row in rows
        if row.get("cat") == "cuda_runtime" and "correlation" in row["args"]
    }
    content["traceEvents"] = [
        row
        for row in rows
        if row.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset")
        or row["args"]["correlation"] in launched
    ]
    path.write_text(json.dumps(content))
    return path


def test_eight_ranks(tmp_path):
    paths = raw_ranks(tmp_path)
    assert len(paths) == 8
    for rank, path in enumerate(paths):
        compare(without_unlaunched(path), rank)
