"""Traces of GPUs, small ones made by hand: figures, odd shapes, late ranks, bad files."""

import gzip
import json
import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from instruments.trace import TraceError
from instruments.trace_figures import (
    alike,
    collectives,
    figures,
    figures_of_step,
    idle_by_stream,
    late_rank,
    of_step,
)
from instruments.trace_gpu import Message, read_devices

HOST, GPU, COMPUTE_STREAM, NCCL_STREAM = 100, 0, 7, 20


def event(category, name, start, microseconds, pid=HOST, tid=HOST, **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": microseconds,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def launched(number, at, name, start, microseconds, stream=COMPUTE_STREAM, **args):
    """A kernel and the call that launched it."""
    args = {"device": GPU, "stream": stream, "correlation": number, **args}
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 5, correlation=number),
        event(category, name, start, microseconds, GPU, stream, **args),
    ]


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)"
SAID = {
    "Collective name": "allreduce",
    "In msg nelems": 1000,
    "dtype": "Float",
    "Group size": 2,
    "Process Group Name": "0",
}


def step():
    """A step of 1,000 µs.

    On the compute stream: 100-300, 310-400 (launched long before), 600-700 (launched at
    550), a copy 800-900 (launched at 500). Messages: 350-650, of which 50 and 50 hidden.
    """
    return [
        event("user_annotation", "ProfilerStep#5", 0, 1000),
        *launched(1, 50, "gemm", 100, 200),
        *launched(2, 60, "gemm", 310, 90),
        *launched(3, 200, ALL_REDUCE, 350, 300, NCCL_STREAM, **SAID),
        *launched(4, 550, "adam", 600, 100),
        *launched(5, 500, "Memcpy DtoH (Device -> Pinned)", 800, 100),
    ]


def write(path, events, **content):
    path.write_text(json.dumps({"traceEvents": events, **content}))
    return path


def read(tmp_path, events, **content):
    [trace] = read_devices(write(tmp_path / "trace.json", events, **content))
    return trace


def microseconds(idle):
    return tuple(round(1e6 * seconds, 3) for seconds in idle)


def test_the_figures_of_a_step(tmp_path):
    trace = read(tmp_path, step())
    found = figures(trace.work)
    assert found.span == pytest.approx(800e-6)
    assert found.compute == pytest.approx(390e-6)
    assert found.communication == pytest.approx(300e-6)
    assert found.copies == pytest.approx(100e-6)
    assert found.hidden == pytest.approx(100e-6)
    assert found.exposed == pytest.approx(200e-6)
    # No work on any stream: 300-310, and 700-800, whose copy was launched at 500.
    assert microseconds(found.idle) == (0, 10, 100)
    assert found.lead.median == pytest.approx(50e-6)  # of 50, 250 and 50; the copy does not count
    assert found.lead.largest == pytest.approx(250e-6)


def test_the_gaps_of_a_stream_have_causes(tmp_path):
    """The gap of 200 µs ends with a kernel that was launched in it."""
    trace = read(tmp_path, step())
    assert microseconds(idle_by_stream(trace.work)["7"]) == (200, 10, 100)
    assert microseconds(idle_by_stream(trace.work)["20"]) == (0, 0, 0)


@pytest.mark.parametrize(("gap", "expected"), [(29, (0, 29, 0)), (30, (0, 0, 30))])
def test_a_short_gap_is_one_below_thirty_microseconds(tmp_path, gap, expected):
    events = [*launched(1, 0, "gemm", 5, 10), *launched(2, 6, "gemm", 15 + gap, 10)]
    assert microseconds(figures(read(tmp_path, events).work).idle) == expected


def test_kernels_of_no_length_are_in_the_span(tmp_path):
    rows = [*launched(1, 0, "tiny", 100, 0), *launched(2, 0, "tiny", 300, 0)]
    found = figures(read(tmp_path, rows).work)
    assert found.span == pytest.approx(200e-6)
    assert found.idle.total == pytest.approx(200e-6)


def test_steps_without_launches_lose_no_kernel(tmp_path):
    rows = [*step(), event("user_annotation", "ProfilerStep#6", 1000, 500)]
    rows = [row for row in rows if row["cat"] != "cuda_runtime"]
    trace = read(tmp_path, rows)
    assert len(trace.work) == 5
    assert trace.steps == []


def test_a_kernel_belongs_to_the_step_that_launched_it(tmp_path):
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("user_annotation", "ProfilerStep#2", 100, 100),
        *launched(1, 90, "gemm", 130, 50),
        *launched(2, 110, "gemm", 180, 20),
    ]
    trace = read(tmp_path, events)
    assert trace.steps == ["ProfilerStep#1", "ProfilerStep#2"]
    assert [work.start for work in of_step(trace, "ProfilerStep#1")] == [130e-6]


def test_what_another_step_runs_hides_messages_and_is_no_idle_time(tmp_path):
    """A step that fetches ahead: the next one's work runs beside it."""
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("user_annotation", "ProfilerStep#2", 100, 100),
        *launched(1, 50, "gemm", 200, 100),
        *launched(2, 60, "gemm", 500, 100),
        *launched(3, 110, "gemm", 350, 100, stream=8),
        *launched(4, 120, ALL_REDUCE, 520, 100, NCCL_STREAM),
    ]
    trace = read(tmp_path, events)
    first = figures_of_step(trace, "ProfilerStep#1")
    assert first.span == pytest.approx(400e-6)
    assert first.compute == pytest.approx(200e-6)
    assert first.communication == 0
    assert microseconds(first.idle) == (0, 0, 100)  # 300-350 and 450-500
    second = figures_of_step(trace, "ProfilerStep#2")
    assert second.compute == pytest.approx(100e-6)
    assert second.hidden == pytest.approx(80e-6)  # beside the first step's 500-600
    assert second.exposed == pytest.approx(20e-6)
    assert microseconds(second.idle) == (0, 0, 50)
    shown = command(tmp_path / "trace.json")
    assert (
        "ProfilerStep#1      0.40      0.20      0.00      0.00      0.00      0.00      0.10   25%"
        in shown.stdout
    )


def test_what_the_steps_have_not_launched_is_left_out(tmp_path):
    """With one step it counts: nothing tells where the recording should have begun."""
    before = launched(1, 0, "gemm", 10, 5)[1:]
    after = launched(3, 210, "gemm", 220, 5)
    inside = launched(2, 20, "gemm", 30, 5)
    first = event("user_annotation", "ProfilerStep#1", 0, 100)
    second = event("user_annotation", "ProfilerStep#2", 100, 100)
    one = read(tmp_path, [first, *before, *inside, *after])
    two = read(tmp_path, [first, second, *before, *inside, *after])
    assert len(one.work) == 3
    assert [work.start for work in two.work] == [30e-6]


OLD_CATEGORIES = {
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "cuda_runtime": "Runtime",
    "user_annotation": "Operator",
}


def test_messages_whose_launch_the_file_does_not_name_are_kept(tmp_path):
    """ROCm 6.1 gives 0 for the number of each kernel of RCCL."""
    rows = []
    for begin in (0, 1000):
        name = f"ProfilerStep#{begin // 1000}"
        rows.append(event("user_annotation", name, begin, 1000))
        rows += launched(begin + 1, begin + 50, "gemm", begin + 100, 200)
        at = {"device": GPU, "stream": NCCL_STREAM, "correlation": 0}
        rows.append(event("kernel", ALL_REDUCE, begin + 350, 100, GPU, NCCL_STREAM, **at))
    trace = read(tmp_path, rows)
    assert [work.step for work in trace.messages] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert figures_of_step(trace, "ProfilerStep#1").exposed == pytest.approx(100e-6)


def older():
    return [{**row, "cat": OLD_CATEGORIES[row["cat"]]} for row in step()]


def texts():
    """The times as some programs that merge traces write them, and rows of other kinds."""
    rows = [{**row, "ts": str(row["ts"])} for row in step()]
    return [*rows, {"ph": "M", "name": "process_name"}, {"ph": "f", "cat": "ac2g", "id": 1}]


def numbers(trace):
    found = figures(trace.work)
    times = [found.span, found.compute, found.communication, found.copies, found.hidden]
    return [*times, found.exposed, *found.idle, *found.lead]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(step()),
        json.dumps({"traceEvents": step()}),
        json.dumps({"traceEvents": older(), "distributedInfo": None}),
        json.dumps({"traceEvents": texts(), "schemaVersion": 1}),
        json.dumps({"traceEvents": [row for row in step() if "Step" not in row["name"]]}),
        gzip.compress(json.dumps({"traceEvents": step()}).encode()),
        gzip.compress(gzip.compress(json.dumps({"traceEvents": step()}).encode())),
    ],
    ids=["array", "bare", "old names", "texts and other rows", "no steps", "gzip", "gzip twice"],
)
def test_traces_of_other_shapes_have_the_same_figures(tmp_path, content):
    path = tmp_path / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    [trace] = read_devices(path)
    assert numbers(trace) == pytest.approx(numbers(read(tmp_path, step())))


def test_a_message_says_what_it_is(tmp_path):
    [found] = alike(read(tmp_path, step()))
    assert found.message == Message("all-reduce", 1000, "Float", 2, "0")
    assert found.message.size_bytes == 4000
    assert found.seconds == [pytest.approx(300e-6)]


SHAPES = {"Input Dims": [[6, 4]], "Input type": ["c10::BFloat16"]}


@pytest.mark.parametrize(
    ("around", "kernel", "expected"),
    [
        ([("record_param_comms", SAID)], "ncclKernel_AllReduce_x", (1000, 4000, "all-reduce")),
        ([("nccl:all_reduce", SHAPES)], "ncclDevKernel_Generic", (24, 48, "all-reduce")),
        ([("nccl:all_to_all", SHAPES)], "ncclKernel_SendRecv_x", (24, 48, "all-to-all")),
        (
            [("c10d::_allgather_base_", {}), ("nccl:_all_gather_base", SHAPES)],
            "ncclDevKernel_AllGather_x",
            (24, 48, "all-gather"),
        ),
        ([], "ncclKernel_ReduceScatter_RING_LL_Sum_float", (None, None, "reduce-scatter")),
        ([("another operator", SAID)], "ncclDevKernel_Generic_1", (None, None, "collective")),
        (
            [],
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(int)",
            (None, None, "all-reduce"),
        ),
        ([], "void cross_device_reduce_1stage<half, 2>(int)", (None, None, "all-reduce")),
    ],
)
def test_a_message_is_told_by_what_stands_around_its_launch(tmp_path, around, kernel, expected):
    rows = launched(1, 50, kernel, 100, 10, NCCL_STREAM)
    for depth, (name, args) in enumerate(around):
        rows.append(event("cpu_op", name, 40 + depth, 30, **args))
    [found] = alike(read(tmp_path, rows))
    assert (found.message.elements, found.message.size_bytes, found.message.kind) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "c"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "c"),
        ("void rcclGenericKernel<0, false>(ncclDevKernelArgsStorage<4096ul>)", "c"),
        ("mscclKernel_Sum_hip_bfloat16_Simple_false", "c"),
        ("void cross_device_reduce_1stage<half, 2>(RankData*)", "c"),
        ("oneccl_reduce_base<float, 2, 16, 1, 1, 2>", "c"),
        ("void deep_ep::internode::dispatch<false, 8, true, 8>(int4*, float*)", "c"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport", "c"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x64_MI16x16x16x1", "w"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "w"),
        ("__amd_rocclr_copyBuffer", "m"),
        ("__amd_rocclr_fillBufferAligned", "m"),
        ("Memset (Device)", "m"),
    ],
)
def test_kernels_of_other_makers_are_told_apart(tmp_path, name, kind):
    kinds = {"c": "communication", "w": "compute", "m": "copy"}
    [work] = read(tmp_path, launched(1, 0, name, 10, 10)).work
    assert work.kind == kinds[kind]


def two_processes():
    """Both use the same numbers for their launches."""
    events = step()
    for row in step():
        on_gpu = row["pid"] == GPU
        args = {**row["args"], "device": 1} if on_gpu else row["args"]
        pid = 1 if on_gpu else HOST + 1
        events.append({**row, "ts": row["ts"] + 5000, "pid": pid, "args": args})
    return events


def test_two_processes_in_a_file_are_two_traces(tmp_path):
    traces = read_devices(write(tmp_path / "both.json", two_processes()))
    assert [trace.device for trace in traces] == ["0", "1"]
    first, second = (figures(trace.work) for trace in traces)
    assert microseconds(first.idle) == microseconds(second.idle) == (0, 10, 100)
    assert second.lead.median == pytest.approx(first.lead.median)


def test_two_devices_in_a_file_are_compared_as_ranks(tmp_path):
    path = write(tmp_path / "both.json", two_processes(), distributedInfo={"rank": 0})
    shown = command(path)
    assert shown.returncode == 0, shown.stderr
    assert "rank 1 (both.json), device 1" in shown.stdout
    assert "shortest on" in shown.stdout
    alone = [row for row in two_processes() if row["name"] != ALL_REDUCE]
    shown = command(write(tmp_path / "alone.json", alone))
    assert "no messages between the devices" in shown.stdout, shown


def test_ranks_that_a_merged_file_calls_by_one_device_are_two_traces(tmp_path):
    """Each process saw its own GPU as number 0."""
    rows = []
    for row in two_processes():
        args = row["args"]
        if "device" in args:
            args = {**args, "device": 0}
        rows.append({**row, "args": args})
    traces = read_devices(write(tmp_path / "merged.json", rows))
    assert [trace.device for trace in traces] == ["0 of 0", "0 of 1"]
    for trace in traces:
        assert figures(trace.work).span == pytest.approx(800e-6)
    shown = command(tmp_path / "merged.json")
    assert "rank 1" in shown.stdout, shown


def test_a_name_that_is_no_text_is_read(tmp_path):
    content = json.dumps(launched(1, 0, "gemm<NAME>", 10, 10)).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(content.replace(b"<NAME>", b"\xff\t"))
    [trace] = read_devices(path)
    assert trace.work[0].name.startswith("gemm")


def test_a_call_that_begins_after_its_kernel_is_still_its_launch(tmp_path):
    """The clocks of host and device differ by some microseconds."""
    [work] = read(tmp_path, launched(1, 12, "gemm", 10, 10)).work
    assert work.launched == pytest.approx(2e-6)


# Several ranks


def rank_trace(path, rank, arrivals, name=ALL_REDUCE, base=0):
    """Collectives that end every 1,000 µs, and begin when the rank arrives."""
    events = []
    for number, arrival in enumerate(arrivals):
        start = 1000 * number + arrival
        events += launched(number, start - 10, name, start, 1000 - arrival, NCCL_STREAM)
    events.append(event("cpu_op", "begin", 0, 1))
    info = {"rank": rank, "world_size": 3}
    write(path, events, distributedInfo=info, baseTimeNanoseconds=base)
    return read_devices(path)[0]


def three(tmp_path, arrivals):
    paths = [tmp_path / f"{rank}.json" for rank in range(3)]
    return [rank_trace(paths[rank], rank, arrivals[rank]) for rank in range(3)]


def test_the_rank_that_arrives_last_is_late(tmp_path):
    found = collectives(three(tmp_path, [(100, 100, 900), (800, 900, 300), (200, 300, 400)]))
    assert [collective.last for collective in found] == [1, 1, 0]
    assert found[0].seconds[0] == pytest.approx(900e-6)
    assert found[0].spread_of_ends == pytest.approx(0, abs=1e-9)
    assert late_rank(found) == 1


def test_ranks_that_take_turns_are_not_late(tmp_path):
    arrivals = [(900, 100, 100), (100, 900, 100), (100, 100, 900)]
    assert late_rank(collectives(three(tmp_path, arrivals))) is None


def test_a_rank_that_is_late_once_by_much_is_late(tmp_path):
    """At the other collectives the ranks come within some microseconds."""
    arrivals = [(100, 104, 103, 100), (900, 100, 100, 103), (100, 101, 100, 100)]
    found = collectives(three(tmp_path, arrivals))
    assert [collective.last for collective in found] == [1, 0, 0, 1]
    assert found[0].waited == pytest.approx(1600e-6)
    assert late_rank(found) == 1


def test_ranks_that_come_together_are_not_late(tmp_path):
    assert late_rank(collectives(three(tmp_path, [(100, 100)] * 3))) is None


def test_kinds_that_start_in_another_order_still_belong_together(tmp_path):
    """An all-reduce and an all-to-all on two streams."""
    for rank, (first, second) in enumerate([(0, 50), (50, 0)]):
        rows = [event("cpu_op", "begin", 0, 1)]
        rows += launched(1, first, ALL_REDUCE, 100 + first, 100 - first, NCCL_STREAM)
        rows += launched(2, second, "ncclKernel_AllToAll_x", 100 + second, 100 - second, 21)
        write(tmp_path / f"{rank}.json", rows, distributedInfo={"rank": rank})
    traces = [read_devices(tmp_path / f"{rank}.json")[0] for rank in range(2)]
    found = {collective.kind: collective.last for collective in collectives(traces)}
    assert found == {"all-reduce": 1, "all-to-all": 0}


def test_the_clocks_of_the_files_are_brought_together(tmp_path):
    """Kineto counts from a moment that the file names."""
    first = rank_trace(tmp_path / "a.json", 0, [100], base=1_700_000_000_000_000_000)
    second = rank_trace(tmp_path / "b.json", 1, [100], base=1_700_000_000_000_007_000)
    [found] = collectives([first, second])
    assert found.spread_of_ends == pytest.approx(7e-6)


def test_ranks_that_do_not_belong_together(tmp_path):
    first = rank_trace(tmp_path / "a.json", 0, [100])
    with pytest.raises(TraceError, match="expected the traces of two ranks or more"):
        collectives([first])
    with pytest.raises(TraceError, match="are both of rank 0: expected one trace of each rank"):
        collectives([first, first])
    other = rank_trace(tmp_path / "b.json", 1, [100], name="ncclKernel_Broadcast_x")
    with pytest.raises(TraceError, match="share no collective: expected one job, one step and"):
        collectives([first, other])
    silent = rank_trace(tmp_path / "c.json", 1, [100], name="gemm")
    with pytest.raises(TraceError, match="share no collective: expected one job"):
        collectives([first, silent])


def test_traces_of_jobs_of_other_sizes_are_refused(tmp_path):
    first = rank_trace(tmp_path / "a.json", 0, [100])
    info = {"rank": 1, "world_size": 8}
    path = write(tmp_path / "b.json", step(), distributedInfo=info)
    [other] = read_devices(path)
    with pytest.raises(TraceError, match=r"a\.json is of a job of 3 ranks, .*b\.json of one of 8"):
        collectives([first, other])


# The command


def command(*files):
    return subprocess.run(
        [sys.executable, "-m", "instruments.trace", *map(str, files)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_prints_one_rank(tmp_path):
    path = write(tmp_path / "one.json", step(), distributedInfo={"rank": 1, "world_size": 2})
    shown = command(path)
    assert shown.returncode == 0, shown.stderr
    assert "one.json: rank 1, device 0, world size 2" in shown.stdout
    assert "ProfilerStep#5" in shown.stdout
    assert "1,000" in shown.stdout


def test_a_reader_of_the_command_may_leave(tmp_path):
    path = write(tmp_path / "one.json", step())
    command = [sys.executable, "-m", "instruments.trace", str(path)]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=300)
    os.close(writer)
    assert ended.stderr == b""


def test_the_command_names_the_late_rank(tmp_path):
    three(tmp_path, [(100, 100, 900), (800, 900, 300), (200, 300, 400)])
    shown = command(*sorted(tmp_path.glob("*.json")))
    assert "Rank 1 is late: at 2 of 3 collectives" in shown.stdout, shown
    assert "each of the others waited 1.35 ms for it, 71% of their waiting." in shown.stdout


def test_files_that_name_no_rank_are_named_each(tmp_path):
    for host, arrival in (("a", 100), ("b", 700)):
        rank_trace(tmp_path / f"{host}.json", None, [arrival])
    shown = command(*sorted(tmp_path.glob("*.json")))
    assert "rank 0 (a.json), device 0      0.90" in shown.stdout, shown
    assert "rank 1 (b.json), device 0      0.30" in shown.stdout, shown
    assert "Rank 1 is late" in shown.stdout, shown


def test_a_rank_that_is_missing_is_told(tmp_path):
    three(tmp_path, [(100, 100, 900), (800, 900, 300), (200, 300, 400)])
    told = "The traces are of 2 of 3 ranks: one without may be later still."
    shown = command(tmp_path / "0.json", tmp_path / "1.json")
    assert told in shown.stdout, shown
    assert told not in command(*sorted(tmp_path.glob("*.json"))).stdout


def test_kernels_that_no_moment_has_in_common_are_told(tmp_path):
    """Files of other steps: the second begins when the first has ended."""
    told = "no moment in common"
    rank_trace(tmp_path / "0.json", 0, [100, 200])
    rank_trace(tmp_path / "1.json", 1, [300, 700], base=5_000_000)
    shown = command(tmp_path / "0.json", tmp_path / "1.json")
    assert f"At 2 of 2 collectives the ranks' kernels have {told}" in shown.stdout, shown
    rank_trace(tmp_path / "1.json", 1, [300, 700], base=500_000)
    shown = command(tmp_path / "0.json", tmp_path / "1.json")
    assert told not in shown.stdout, shown


def cpu_trace(path):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(8).sum()
    profiler.export_chrome_trace(str(path))


COMPRESSED = gzip.compress(json.dumps({"traceEvents": step()}).encode())
JSON_EXPECTED = "expected the JSON of torch.profiler, gzip or not"
BAD = {
    "empty": ("t.json", b"", f"is empty: {JSON_EXPECTED}"),
    "cut off": ("t.json", json.dumps(step()).encode()[:-9], "it does not hold valid JSON"),
    "gzip cut off": ("t.json.gz", COMPRESSED[:-20], "it is cut off or damaged"),
    "Nsight's report": ("r.nsys-rep", b"\x00\x01", "is a report of Nsight Systems: expected"),
    "Nsight's database": ("r.sqlite", b"SQLite format 3\x00", "a database of SQLite"),
    "a pickle": ("dump_0", b"\x80\x04\x95", "is a pickle"),
    "other JSON": ("t.json", b'{"a": 1}', "expected its JSON, with traceEvents"),
    "numbers": ("t.json", b"[1, 2]", "expected its JSON, with traceEvents"),
    "no kernels": ("t.json", b'{"traceEvents": []}', "holds no kernel of a GPU: expected"),
    "no time": (
        "t.json",
        json.dumps([{**step()[1], "dur": "soon"}, step()[2]]).encode(),
        "expected its JSON, with traceEvents",
    ),
    "no end": (
        "t.json",
        json.dumps([{**step()[2], "dur": float("inf")}]).encode(),
        "event 'gemm' has no finite time",
    ),
    "no number": (
        "t.json",
        json.dumps([{**step()[2], "dur": 10**400}]).encode(),
        "int too large to convert",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_line(tmp_path, what):
    name, content, says = BAD[what]
    path = tmp_path / name
    path.write_bytes(content)
    refused(command(path), str(path), says)


def test_a_cpus_trace_and_what_is_no_file_are_one_line(tmp_path):
    cpu_trace(tmp_path / "cpu.json")
    refused(command(tmp_path / "cpu.json"), "cpu.json holds no kernel of a GPU: expected")
    refused(command(tmp_path / "no.json"), "cannot read the trace", "No such file")
    refused(command(tmp_path), "cannot read the trace", "Is a directory")


def refused(shown, *says):
    assert shown.returncode == 2, shown
    assert shown.stdout == ""
    [line] = shown.stderr.splitlines()
    for words in says:
        assert words in line
