import contextlib
import gzip
import itertools
import json
import logging
import math
import re
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerAction

from instruments import flops, lanes, profiled_training, profiler_cost, unsynchronised
from instruments.breakdown import break_down, recorded_steps
from instruments.families import FAMILIES, family, uses_tensor_cores
from instruments.intervals import intersect, length, subtract, union
from instruments.profiling import REGIONS, Profiler, Schedule, region
from instruments.trace import TraceError, read_trace
from miniddp import DistributedDataParallel, ring, run_ranks

from ..parity import row

# The schedule

small = st.integers(0, 5)
schedules = st.builds(
    Schedule, skip_first=small, wait=small, warmup=small, active=st.integers(1, 5), repeat=small
)


@row(
    "parts",
    "exact",
    says="The profiler's schedule: what each step does, for any `skip_first`, "
    "`wait`, `warmup`, `active` and `repeat`.",
)
@given(schedules, st.integers(0, 80))
def test_the_schedule_is_that_of_torch(schedule, step):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a warm-up of no steps
        action = schedule.to_torch()(step)
    recording = action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
    assert (schedule.phase(step) == "record") == recording
    assert (schedule.phase(step) == "warmup") == (action == ProfilerAction.WARMUP)
    assert (schedule.phase(step) in ("skip", "wait", "done")) == (action == ProfilerAction.NONE)


@given(schedules)
def test_each_cycle_records_the_active_steps(schedule):
    cycles = 3 if schedule.repeat == 0 else schedule.repeat
    cycle = schedule.wait + schedule.warmup + schedule.active
    steps = schedule.skip_first + cycles * cycle
    phases = Counter(schedule.phase(step) for step in range(steps + 20 * (schedule.repeat > 0)))
    assert phases["record"] == cycles * schedule.active
    assert phases["warmup"] == cycles * schedule.warmup
    assert phases["wait"] == cycles * schedule.wait
    assert phases["skip"] == schedule.skip_first
    assert phases["done"] == 20 * (schedule.repeat > 0)


def test_one_repeat_is_one_cycle():
    assert Schedule().recorded(100) == [8, 9, 10, 11, 12]
    assert Schedule(repeat=2).recorded(100) == [8, 9, 10, 11, 12, 16, 17, 18, 19, 20]
    assert Schedule(repeat=0).recorded(22) == [8, 9, 10, 11, 12, 16, 17, 18, 19, 20]
    assert [Schedule().phase(step) for step in (0, 4, 5, 6, 7, 8, 12, 13)] == [
        *("skip", "skip", "wait", "warmup", "warmup", "record", "record", "done")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"active": 0}, "active must be an integer of at least 1, not 0"),
        ({"wait": -1}, "wait must be an integer of at least 0, not -1"),
        ({"skip_first": 1.5}, r"skip_first must be an integer of at least 0, not 1\.5"),
    ],
)
def test_a_bad_schedule_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**arguments)


# Intervals of time, against sets of whole seconds

interval_lists = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def seconds(intervals) -> set[int]:
    return {second for start, end in intervals for second in range(start, end)}


@given(interval_lists, interval_lists)
def test_intervals_are_sets_of_moments(first, second):
    assert seconds(union(first)) == seconds(first)
    assert seconds(intersect(first, second)) == seconds(first) & seconds(second)
    assert seconds(subtract(first, second)) == seconds(first) - seconds(second)
    assert length(first) == len(seconds(first))


@given(interval_lists, interval_lists)
def test_intervals_come_back_in_order_disjoint_and_not_empty(first, second):
    for result in (union(first), intersect(first, second), subtract(first, second)):
        flat = list(itertools.chain(*result))
        assert all(start < end for start, end in result)
        assert flat == sorted(flat)
    touching = zip(union(first), union(first)[1:], strict=False)
    assert all(left[1] < right[0] for left, right in touching)


@given(interval_lists, interval_lists)
def test_what_is_exposed_and_what_is_hidden_make_up_the_whole(first, second):
    assert length(intersect(first, second)) + length(subtract(first, second)) == length(first)


# Names

OPERATORS = {
    "aten::addmm": "matmul",
    "aten::mm": "matmul",
    "aten::bmm": "matmul",
    "aten::linear": "matmul",
    "aten::convolution_backward": "matmul",
    "AddmmBackward0": "matmul",
    "MmBackward0": "matmul",
    "aten::scaled_dot_product_attention": "attention",
    "aten::_softmax": "attention",
    "aten::_log_softmax": "other",
    "LogSoftmaxBackward0": "other",
    "aten::native_layer_norm": "norm",
    "NativeBatchNormBackward0": "norm",
    "aten::linalg_vector_norm": "other",
    "aten::add_": "elementwise",
    "aten::mul": "elementwise",
    "MulBackward0": "elementwise",
    "aten::gelu_backward": "elementwise",
    "aten::mean": "elementwise",
    "aten::_foreach_add_": "elementwise",
    "aten::native_dropout": "elementwise",
    "aten::embedding": "other",
    "aten::view": "other",
    "aten::empty": "other",
    "autograd::engine::evaluate_function: AddmmBackward0": "other",
    "aten::copy_": "memory copy",
    "aten::cat": "memory copy",
    "aten::to": "memory copy",
    "aten::topk": "other",
    "Optimizer.step#AdamW.step": "optimizer",
    "aten::_fused_adamw_": "optimizer",
    "c10d::allreduce_": "communication",
    "gloo:all_reduce": "communication",
}
KERNELS = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "communication",
    "void rcclGenericKernel<0, false>(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)": "communication",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "matmul",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN": "matmul",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn": "matmul",
    "ampere_sgemm_128x64_tn": "matmul",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nt_align1>": "matmul",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_ffma": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matmul",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3": "attention",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, "
    "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>": "other",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>": "norm",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise",
    "void at::native::elementwise_kernel<2, at::native::direct_copy_kernel_cuda>": "memory copy",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "elementwise",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMath>": "optimizer",
    "Memcpy HtoD (Pinned -> Device)": "memory copy",
    "Memset (Device)": "memory copy",
}
TENSOR_CORES = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3",
}


def test_names_tell_the_family():
    names = OPERATORS | KERNELS
    assert {name: family(name) for name in names} == names
    assert set(names.values()) == set(FAMILIES)


def test_names_of_kernels_tell_tensor_cores():
    assert {name for name in KERNELS if uses_tensor_cores(name)} == TENSOR_CORES


# A hand-made trace of two steps of 100 µs on a GPU. The times in the comments are in µs.


def event(category, name, start, duration, tid=1, pid=10, **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": 5e12 + start,
        "dur": duration,
        "args": args,
    }


def kernel(name, start, duration, launched, stream=7, category="kernel"):
    number = next(numbers)
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, 1, correlation=number),
        event(
            category, name, start, duration, tid=stream, pid=0, correlation=number, stream=stream
        ),
    ]


numbers = itertools.count(1)
TENSOR_GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MULTI_TENSOR = "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor>"


def gpu_events():
    steps = []
    for begin in (0, 100):
        at = begin.__add__
        steps += [
            event("user_annotation", f"ProfilerStep#{8 + begin // 100}", at(0), 100),
            event("gpu_user_annotation", f"ProfilerStep#{8 + begin // 100}", at(5), 90, 7, 0),
            event("user_annotation", "forward", at(0), 10),
            event("gpu_user_annotation", "forward", at(5), 30, 7, 0),
            event("user_annotation", "backward", at(10), 30),
            event("user_annotation", "nccl:all_reduce", at(20), 2),
            event("gpu_user_annotation", "nccl:all_reduce", at(40), 30, 20, 0),
            event("user_annotation", "opt_step", at(40), 50),
            event("user_annotation", "Optimizer.step#AdamW.step", at(41), 48),
            event("cpu_op", "aten::mm", at(1), 90),
            *kernel("Memcpy HtoD (Pinned -> Device)", at(0), 5, at(0), category="gpu_memcpy"),
            *kernel(TENSOR_GEMM, at(5), 30, at(5)),  # forward: 5 to 35
            *kernel("ampere_sgemm_128x64_tn", at(35), 15, at(12)),  # backward: 35 to 50, with
            *kernel(ALL_REDUCE, at(40), 30, at(20), stream=20),  # 40 to 70, hidden until 50
            *kernel(MULTI_TENSOR, at(70), 20, at(45)),  # optimizer: 70 to 90
        ]
    return steps


def write(path, events, **more):
    content = {"schemaVersion": 1, "traceEvents": events, **more}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_the_time_of_a_gpu_is_broken_down(tmp_path):
    about = {"rank": 1, "world_size": 2, "backend": "nccl"}
    path = write(tmp_path / "t.json.gz", gpu_events(), distributedInfo=about)
    result = break_down(read_trace(path))
    assert (result.rank, result.world_size, result.steps) == (1, 2, 2)
    assert result.step_seconds == pytest.approx(100e-6)

    shares = {name: part.share for name, part in result.families.items()}
    assert shares == pytest.approx(
        {
            "communication": 0.30,
            "optimizer": 0.20,
            "attention": 0,
            "norm": 0,
            "matmul": 0.45,
            "memory copy": 0.05,
            "elementwise": 0,
            "other": 0,
            "idle": 0.10,
        }
    )
    assert result.communication.seconds == pytest.approx(30e-6)
    assert result.hidden.seconds == pytest.approx(10e-6)
    assert result.exposed.seconds == pytest.approx(20e-6)
    assert result.gpu_busy == pytest.approx(0.90)
    assert result.tensor_cores == pytest.approx(30 / (30 + 15 + 30 + 20))

    on_gpu = {name: part.gpu_seconds for name, part in result.regions.items()}
    assert on_gpu == pytest.approx({"forward": 35e-6, "backward": 35e-6, "opt_step": 20e-6})
    on_cpu = {name: part.share for name, part in result.regions.items()}
    assert on_cpu == pytest.approx({"forward": 0.10, "backward": 0.30, "opt_step": 0.50})


def test_what_an_optimizer_sends_is_communication(tmp_path):
    """A sharded optimizer sends parameters in its step."""
    events = [
        event("user_annotation", "ProfilerStep#8", 0, 100),
        event("user_annotation", "Optimizer.step#ZeroRedundancyOptimizer.step", 40, 50),
        *kernel(MULTI_TENSOR, 50, 20, 45),
        *kernel(ALL_REDUCE, 60, 30, 55, stream=20),
    ]
    result = break_down(read_trace(write(tmp_path / "t.json.gz", events)))
    assert result.communication.seconds == pytest.approx(30e-6)
    assert result.exposed.seconds == pytest.approx(20e-6)
    assert result.families["optimizer"].seconds == pytest.approx(20e-6)


def test_the_bars_of_a_step_on_a_gpu(tmp_path):
    trace = read_trace(write(tmp_path / "t.json.gz", gpu_events()))
    _, second = recorded_steps(trace)
    assert second.start == pytest.approx(100e-6)
    bars = lanes.bars_of(trace, second, ("forward", "opt_step"), gap=1e-9)
    assert [(bar.lane, bar.label) for bar in bars] == [
        ("regions", "forward"),
        ("regions", "opt_step"),
        ("work", ""),
        ("work", ""),
        ("messages", ""),
    ]
    times = [(1e6 * bar.start, 1e6 * bar.seconds) for bar in bars]
    for found, expected in zip(
        times, [(0, 10), (40, 50), (0, 50), (70, 20), (40, 30)], strict=True
    ):
        assert found == pytest.approx(expected)


def test_a_step_is_drawn_in_its_ranks_colour(tmp_path):
    trace = read_trace(write(tmp_path / "t.json.gz", gpu_events()))
    fig, axes = plt.subplots()
    step, _ = recorded_steps(trace)
    lanes.draw(axes, {"DDP": trace}, {"DDP": step}, {"backward": True, "opt_step": False}, ["red"])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        "DDP: regions",
        "DDP: work",
        "DDP: messages",
    ]
    assert [text.get_text() for text in axes.texts] == ["backward"], "opt_step asks for no label"
    assert len(axes.collections) == 5
    right = max(path.vertices[:, 0].max() for bars in axes.collections for path in bars.get_paths())
    assert right == pytest.approx(0.09), "opt_step ends after 90 µs"
    assert {bars.get_facecolor()[0][:3].tolist() == [1, 0, 0] for bars in axes.collections} == {
        True
    }
    plt.close(fig)


def test_small_gaps_are_filled_and_larger_ones_are_not():
    spans = [(0, 2), (3, 4), (6, 8)]
    assert lanes.without_gaps(spans, 0) == spans
    assert lanes.without_gaps(spans, 1) == [(0, 4), (6, 8)]
    assert lanes.without_gaps(spans, 2) == [(0, 8)]


def test_the_usual_step_is_the_middle_one_by_its_messages(tmp_path):
    events = []
    for number, message in enumerate([30, 90, 60]):
        begin = 100 * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", begin, 100))
        events.append(event("user_annotation", "gloo:all_reduce", begin + 1, message, tid=2))
    trace = read_trace(write(tmp_path / "t.json.gz", events))
    assert lanes.usual_step(trace).name == "ProfilerStep#2"


def test_a_table_holds_regions_work_and_overlap(tmp_path):
    result = break_down(read_trace(write(tmp_path / "t.json.gz", gpu_events())))
    rows = {(kind, name): (ms, share) for kind, name, ms, share in result.rows()}
    assert rows["region", "backward"] == pytest.approx((0.030, 0.30))
    assert rows["work", "matmul"] == pytest.approx((0.045, 0.45))
    assert rows["communication", "exposed"] == pytest.approx((0.020, 0.20))
    assert len(rows) == 3 + len(FAMILIES) + 1 + 2


def test_a_gpu_that_works_after_the_last_step_prolongs_it(tmp_path):
    late = kernel(TENSOR_GEMM, 190, 30, 99)
    result = break_down(read_trace(write(tmp_path / "t.json.gz", gpu_events() + late)))
    assert result.step_seconds == pytest.approx(110e-6)
    assert result.families["matmul"].seconds == pytest.approx((90e-6 + 30e-6) / 2)


def test_what_earlier_steps_had_launched_is_not_of_the_recorded_ones(tmp_path):
    """The host is 50 µs ahead: as long as the GPU still runs what went unrecorded."""
    events = []
    for recorded in gpu_events():
        delay = 50 if recorded["pid"] == 0 else 0
        events.append({**recorded, "ts": recorded["ts"] + delay})
    earlier = kernel("ampere_sgemm_128x64_tn", 0, 50, 0)[1:]  # without its launch
    for recorded in events:  # as ROCm 6.1 numbers them
        if recorded["name"] == ALL_REDUCE:
            recorded["args"]["correlation"] = 0
    result = break_down(read_trace(write(tmp_path / "t.json.gz", events + earlier)))
    assert result.step_seconds == pytest.approx((240e-6 - 50e-6) / 2)
    assert result.families["matmul"].seconds == pytest.approx(45e-6)
    assert result.communication.seconds == pytest.approx(30e-6)
    assert result.regions["forward"].seconds == pytest.approx(10e-6)
    assert result.regions["forward"].gpu_seconds == pytest.approx(35e-6)


def test_gloo_between_gpus_is_communication(tmp_path):
    events = [row for row in gpu_events() if "ncclDev" not in row["name"]]
    events.append(event("user_annotation", "gloo:all_reduce", 30, 30, tid=3))
    events.append(event("cpu_op", "aten::copy_", 31, 20, tid=3))
    result = break_down(read_trace(write(tmp_path / "t.json.gz", events)))
    assert result.communication.seconds == pytest.approx(30e-6 / 2)
    assert result.exposed.seconds == pytest.approx(10e-6 / 2)


def test_a_trace_without_compression_is_read_too(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": gpu_events()}))
    assert break_down(read_trace(tmp_path / "t.json")).steps == 2


# A hand-made trace of one step of 100 µs on a CPU


def cpu_events():
    return [
        event("user_annotation", "ProfilerStep#3", 0, 100),
        event("user_annotation", "forward", 0, 40),
        event("cpu_op", "aten::linear", 0, 30),  # one matmul from 0 to 30,
        event("cpu_op", "aten::t", 1, 2),
        event("cpu_op", "aten::addmm", 3, 27),  # with what lies in it
        event("cpu_op", "aten::copy_", 4, 5),
        event("cpu_op", "aten::view", 30, 5),  # other: 30 to 35
        event("user_annotation", "backward", 40, 30),
        event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 40, 10),
        event("cpu_op", "MulBackward0", 42, 8),  # elementwise: 42 to 50, other: 40 to 42
        event("cpu_op", "c10d::allreduce_", 50, 2),  # communication: 50 to 52
        event("cpu_op", "aten::mul", 55, 15),  # elementwise: 55 to 70
        event("user_annotation", "gloo:all_reduce", 53, 27, tid=2),  # and 53 to 80
        event("cpu_op", "aten::copy_", 54, 3, tid=2),
        event("user_annotation", "Optimizer.step#SGD.step", 85, 10),  # optimizer: 85 to 95
        event("cpu_op", "aten::add_", 86, 5),
        event("cpu_op", "aten::mm", 60, 5, tid=4),  # in another thread
        {"ph": "M", "name": "thread_name", "pid": 10, "tid": 1, "args": {"name": "python"}},
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "pid": 10,
            "tid": 1,
            "ts": 5e12,
        },
    ]


def test_the_time_of_a_cpu_is_broken_down(tmp_path):
    result = break_down(read_trace(write(tmp_path / "t.json.gz", cpu_events())))
    shares = {name: part.share for name, part in result.families.items()}
    assert shares == pytest.approx(
        {
            "communication": 0.29,
            "optimizer": 0.10,
            "attention": 0,
            "norm": 0,
            "matmul": 0.35,
            "memory copy": 0,
            "elementwise": 0.23,
            "other": 0.07,
            "idle": 0.05 + 0.01 + 0.05 + 0.05,
        }
    )
    assert result.hidden.share == pytest.approx(0.15)
    assert result.exposed.share == pytest.approx(0.02 + 0.12)
    assert {name: part.share for name, part in result.regions.items()} == pytest.approx(
        {"forward": 0.40, "backward": 0.30}
    )
    assert (result.gpu_busy, result.tensor_cores) == (None, None)
    assert result.regions["forward"].gpu_seconds is None


def test_a_message_does_not_swallow_the_work_of_the_thread_that_sent_it(tmp_path):
    events = [
        event("user_annotation", "ProfilerStep#0", 0, 10),
        event("user_annotation", "gloo:recv", 0, 10),
        event("cpu_op", "aten::add_", 2, 4),
        event("cpu_op", "aten::embedding", 7, 1),
    ]
    result = break_down(read_trace(write(tmp_path / "t.json.gz", events)))
    assert result.families["other"].share == pytest.approx(0.1)
    assert result.hidden.share == pytest.approx(0.5)
    assert result.exposed.share == pytest.approx(0.5)


# Files that are no traces


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


ROW = event("cpu_op", "aten::mm", 0, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a trace: it does not hold valid JSON"),
        (b"\x80\x04 no json", "is not a trace: it does not hold valid JSON"),
        (b'{"traceEvents": [', "is not a trace: it does not hold valid JSON"),
        (b"[" * 100_000, "is not a trace: it does not hold valid JSON"),
        (b"[]", "is not a trace of torch.profiler"),
        (b'{"nodes": []}', "is not a trace of torch.profiler: KeyError\\('traceEvents'\\)"),
        (b'{"traceEvents": 3}', "is not a trace of torch.profiler"),
        (b'{"traceEvents": [3]}', "is not a trace of torch.profiler"),
        (json.dumps({"traceEvents": [{**ROW, "dur": -1}]}), "event 'aten::mm' has no name or no"),
        (json.dumps({"traceEvents": [{**ROW, "ts": "now"}]}), "is not a trace of torch.profiler"),
        (json.dumps({"traceEvents": [{**ROW, "dur": math.nan}]}), "no finite time"),
        (json.dumps({"traceEvents": [{**ROW, "name": 3}]}), "is not a trace of torch.profiler"),
        (json.dumps({"traceEvents": [{**ROW, "args": []}]}), "is not a trace of torch.profiler"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, content, message):
    path = tmp_path / "a.pt.trace.json.gz"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("harm", [truncated, flipped])
def test_a_damaged_trace_is_named(tmp_path, harm):
    path = write(tmp_path / "a.pt.trace.json.gz", gpu_events())
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(TraceError, match=f"cannot read the trace {path}: it"):
        read_trace(path)


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(TraceError, match=f"cannot read the trace {tmp_path}/no: No such file"):
        read_trace(tmp_path / "no")


@pytest.mark.parametrize(
    "events", [[], [event("cpu_op", "aten::mm", 0, 1)], [event("user_annotation", "a", 0, 1)]]
)
def test_a_trace_without_steps_is_named(tmp_path, events):
    trace = read_trace(write(tmp_path / "a", events))
    with pytest.raises(TraceError, match="trace of rank 0 holds no ProfilerStep: record it with"):
        break_down(trace)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_trace(tmp_path_factory, data):
    for start in (b"", b"\x1f\x8b"):
        path = tmp_path_factory.getbasetemp() / "random"
        path.write_bytes(start + data)
        with pytest.raises(TraceError):
            read_trace(path)


# What torch really writes

SHORT = Schedule(skip_first=1, wait=1, warmup=1, active=2)


def train(rank, folder, steps=6, **options):
    """Steps whose sizes and messages are known, profiled."""
    torch.set_num_threads(1)
    layers = [nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 8)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    with Profiler(folder, **{"schedule": SHORT, **options}) as profiler:
        for _ in range(steps):
            with region("data_movement"):
                inputs = torch.randn(32, 64)
            with region("forward"):
                loss = model(inputs).square().mean()
            with region("backward"):
                loss.backward()
            with region("sync_grads"):
                ring.all_reduce(torch.ones(1000))
            with region("opt_step"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    return profiler.traces


def test_real_traces_of_two_ranks(tmp_path):
    options = {
        "all_ranks": True,
        "record_shapes": True,
        "profile_memory": True,
        "with_stack": True,
        "with_flops": True,
    }
    traces = run_ranks(lambda rank: train(rank, tmp_path / "new", **options), 2)
    names = [path.name for paths in traces for path in paths]
    assert names == ["rank0.5.pt.trace.json.gz", "rank1.5.pt.trace.json.gz"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    for rank, (path,) in enumerate(traces):
        trace = read_trace(path)
        steps = [e.name for e in trace.events if e.name.startswith("ProfilerStep#")]
        assert steps == ["ProfilerStep#3", "ProfilerStep#4"]
        result = break_down(trace)
        assert (result.rank, result.world_size, result.steps) == (rank, 2, 2)
        assert tuple(result.regions) == REGIONS
        assert 0.5 < sum(part.share for part in result.regions.values()) <= 1
        seen = {name for name, part in result.families.items() if part.share > 0}
        assert seen >= {"communication", "optimizer", "norm", "matmul", "elementwise", "idle"}
        assert all(0 <= part.share <= 1 for part in result.families.values())
        together = result.exposed.seconds + result.hidden.seconds
        assert together == pytest.approx(result.communication.seconds)
        messages = {e.name for e in trace.events if e.name.startswith("gloo:")}
        assert messages >= {"gloo:all_reduce", "gloo:send", "gloo:recv"}
        assert (result.gpu_busy, result.tensor_cores) == (None, None)


def test_rank_0_alone_records_each_cycle_into_a_file(tmp_path):
    twice = Schedule(skip_first=0, wait=1, warmup=1, active=1, repeat=2)
    traces = run_ranks(lambda rank: train(rank, tmp_path, 8, schedule=twice), 2)
    files = [tmp_path / f"rank0.{step}.pt.trace.json.gz" for step in (3, 6)]
    assert traces == [files, []]
    assert sorted(tmp_path.iterdir()) == files
    assert [break_down(read_trace(file)).steps for file in files] == [1, 1]


def test_the_names_are_those_that_the_plugin_of_tensorboard_looks_for(tmp_path):
    pattern = re.compile(r"^(.*?)\.pt\.trace\.json(?:\.gz)?$")  # of its consts.py
    with Profiler(tmp_path, Schedule(0, 0, 1, 1)) as profiler:
        for _ in range(2):
            profiler.step()
    (path,) = profiler.traces
    assert pattern.match(path.name).group(1) == "rank0.2"


def test_a_training_that_ends_while_recording_leaves_what_there_is(tmp_path):
    with Profiler(tmp_path, Schedule(0, 0, 1, 5)) as profiler:
        for _ in range(3):
            torch.ones(2).add(1)
            profiler.step()
    (path,) = profiler.traces
    assert break_down(read_trace(path)).steps >= 2


def test_a_training_that_is_too_short_to_record_says_so(tmp_path, caplog):
    with Profiler(tmp_path) as profiler:
        for _ in range(7):
            profiler.step()
    assert profiler.traces == []
    assert caplog.messages == [
        "no step was profiled: training ended after 7, recording would have begun after 8 "
        "(skip_first + wait + warmup)"
    ]


def test_a_trace_that_cannot_be_written_does_not_end_training(tmp_path, caplog, monkeypatch):
    def full(_, path):
        Path(path).write_bytes(b"the beginning of a trace")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    with Profiler(tmp_path, Schedule(0, 0, 1, 1)) as profiler:
        for _ in range(3):
            profiler.step()
    path = tmp_path / "rank0.2.pt.trace.json.gz"
    assert caplog.messages == [f"cannot write the trace {path}: No space left on device"]
    assert caplog.records[0].levelno == logging.ERROR
    assert profiler.traces == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def message(rank):
        with pytest.raises(OSError, match="File exists") as caught:
            Profiler(tmp_path / "file")
        dist.barrier()
        return str(caught.value)

    assert run_ranks(message, 2) == [f"[Errno 17] File exists: '{tmp_path / 'file'}'"] * 2


def test_an_error_in_training_passes_through(tmp_path):
    with pytest.raises(ZeroDivisionError), Profiler(tmp_path, SHORT):
        raise ZeroDivisionError


def test_a_region_needs_the_name_of_a_region():
    with pytest.raises(ValueError, match="must be an identifier, not 'nccl:all_reduce'"):
        region("nccl:all_reduce")


# Floating point operations


def test_a_dense_model_takes_six_flops_per_parameter_and_token():
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    tokens = torch.randn(7, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert flops.training_flops(4 * 32 * 32, 7) == counter.get_total_flops()


@given(st.floats(1, 1e18), st.floats(1e-3, 1e3), st.floats(1, 1e15))
def test_utilisation_is_the_share_of_the_peak(amount, time, peak):
    assert flops.utilisation(amount, time, peak) * peak * time == pytest.approx(amount)


def test_the_published_utilisation_of_palm_comes_out():
    # PaLM, section 4.1: 540B parameters, 6144 TPU v4 of 275 TFLOP/s, 238.3K tokens per second;
    # 45.7 % without attention, 46.2 % with it.
    needed = flops.training_flops(540_350_000_000, 238_300)
    assert flops.utilisation(needed, 1.0, 6144 * 275e12) == pytest.approx(0.457, abs=0.001)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756.5e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5e12),
        ("NVIDIA H200", "fp16", 989.5e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce MX150", "fp32", None),
        ("AMD EPYC", "fp32", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(name, precision, peak):
    assert flops.peak_flops(name, precision) == peak


def test_the_measured_peak_is_that_of_real_products():
    peak = flops.measured_peak_flops(torch.device("cpu"), size=128, repeats=3)
    assert 1e6 < peak < 1e15


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flops.training_flops(0, 3), "parameters must be an integer of at least 1, not 0"),
        (lambda: flops.utilisation(1, 0, 1), "seconds and peak_flops must be more than 0"),
        (lambda: flops.utilisation(1, 1, math.inf), "peak_flops must be a finite number"),
        (lambda: flops.peak_flops("Tesla T4", "int8"), "precision must be bf16, .*, not 'int8'"),
        (lambda: flops.measured_peak_flops(torch.device("cpu"), size=0), "size must be an int"),
    ],
)
def test_bad_amounts_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# What the profiler records and costs


def test_torch_records_one_cycle_for_each_repetition():
    assert profiler_cost.steps_in_traces(repeat=1, steps=20) == [[8, 9, 10, 11, 12]]
    assert profiler_cost.steps_in_traces(repeat=2, steps=20)[1] == [16, 17, 18, 19]
    assert profiler_cost.traces_without_step() == 0


def test_events_are_those_of_the_last_cycle_unless_they_accumulate():
    assert profiler_cost.steps_kept(acc_events=False) == 2
    assert profiler_cost.steps_kept(acc_events=True) == 4


def test_the_cost_of_a_setting_is_that_of_its_steps(monkeypatch):
    """Of a step of 2 s, which takes 3 s with stacks."""
    now = [0.0]
    recording = [False]
    monkeypatch.setattr(profiler_cost.time, "process_time", lambda: now[0])

    @contextlib.contextmanager
    def profile(schedule, with_stack):
        recording[0] = with_stack
        yield SimpleNamespace(step=lambda: None)
        recording[0] = False

    def step():
        now[0] += 3.0 if recording[0] else 2.0

    monkeypatch.setattr(profiler_cost, "profile", profile)
    settings = {"plain": {"with_stack": False}, "stacks": {"with_stack": True}}
    costs = profiler_cost.costs_of(step, settings, rounds=3, active=2)
    assert {name: cost.ratio for name, cost in costs.items()} == {"plain": 1.0, "stacks": 1.5}


class Toy(nn.Module):
    """Has a loss, as a language model has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return SimpleNamespace(loss=self.layer(inputs).square().mean())


def compared(rank):
    torch.manual_seed(0)
    batches = [{"inputs": torch.randn(2, 4) + rank} for _ in range(3)]
    torch.manual_seed(0)
    first = Toy()
    torch.manual_seed(0)
    return unsynchronised.with_and_without(first, Toy(), batches, rounds=2)


def test_what_does_not_synchronise_drifts_apart():
    for synchronised, apart in run_ranks(compared, 2):
        assert synchronised.spread == 0 < apart.spread
        assert min(synchronised.seconds, apart.seconds) > 0


def test_pairs_are_dealt_out_to_the_ranks_again_and_again():
    """Seven pairs, of which two ranks take two each in a step; the tokenizer stands pairs side by
    side."""

    class Tokenizer:
        def pad(self, rows, **_):
            return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    encoded = [{"input_ids": number, "labels": 0} for number in range(7)]
    loader = profiled_training.Loader(encoded, Tokenizer(), world_size=2, pairs_per_rank=2)
    dealt = [loader.batch(step, rank)["input_ids"].tolist() for step in (0, 1) for rank in (0, 1)]
    assert dealt == [[0, 1], [2, 3], [4, 5], [6, 0]]


def constant_model():
    torch.manual_seed(0)
    return Toy()


class Ones:
    def batch(self, step, rank):
        return {"inputs": torch.full((2, 4), 1.0 + rank)}


def slow_second(rank, folder):
    path = profiled_training.profiled_training(
        rank, folder, constant_model, Ones(), "miniddp", (0, 0.05)
    )
    return break_down(read_trace(path))


def test_one_rank_can_be_told_to_load_slowly(tmp_path):
    first, second = run_ranks(slow_second, 2, tmp_path, timeout=120)
    assert (first.rank, second.rank, first.steps, second.steps) == (0, 1, 5, 5)
    assert second.regions["load_batch"].seconds > 0.04
    assert {"forward", "backward", "sync_grads", "opt_step"} <= first.regions.keys()
