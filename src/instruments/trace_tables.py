"""The tables of `measurements/traces`, made from the raw traces that others published.

    python -m instruments.trace_tables FOLDER

writes them anew. `sources.toml` beside them says where each raw file is from; FOLDER holds
them as its entries `file` say.
"""

import csv
import hashlib
import io
import itertools
import json
import pickle
import re
import statistics
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from instruments.breakdown import recorded_steps
from instruments.intervals import intersect, length, union
from instruments.memory_snapshot import GIB, by_bytes, read_snapshot
from instruments.memory_timeline import KINDS, read_timeline
from instruments.memory_timeline import steps as steps_of_timeline
from instruments.nsys import read_range
from instruments.tensors import MODELS
from instruments.trace import Event, Trace, read_trace
from instruments.trace_figures import Figures, collectives, figures, of_step
from instruments.trace_gpu import COMPUTE, DeviceTrace, Work, read_devices
from miniddp.bucket import MIB, plan_buckets

TABLES = Path(__file__).parents[2] / "measurements/traces"

HOST_CATEGORIES = ("cpu_op", "user_annotation")

Row = dict[str, str]


def micro(seconds: float) -> str:
    """Microseconds, to the nanosecond."""
    return f"{1e6 * seconds:.3f}".rstrip("0").rstrip(".")


def milli(seconds: float) -> str:
    """Milliseconds, to ten microseconds."""
    return f"{1e3 * seconds:.2f}"


def sources() -> dict[str, dict[str, str]]:
    """Table → where it is from."""
    found = tomllib.loads((TABLES / "sources.toml").read_text(encoding="utf-8"))
    return {name: entry for name, entry in found.items() if name != "columns"}


def raw_files(name: str, folder: Path) -> list[Path]:
    """The raw files of a table, in order: `file` may hold a pattern."""
    return sorted(folder.glob(sources()[name]["file"]))


def digest(files: Iterable[Path]) -> str:
    """SHA-256 of the files, one after the other."""
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def table(name: str, folder: Path) -> str:
    """The text of a table, made from the raw files in the folder."""
    rows = MAKERS[name](raw_files(name, folder))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read(name: str) -> list[Row]:
    """The rows of a table that is there."""
    with open(TABLES / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# A step of one rank


def steps(files: Sequence[Path]) -> list[Row]:
    """The figures of each step, and of all."""
    [trace] = read_devices(files[0])
    rows = [
        {
            "step": step.removeprefix("ProfilerStep#"),
            **cells(figures(of_step(trace, step))),
        }
        for step in trace.steps
    ]
    return [*rows, {"step": "all", **cells(figures(trace.work))}]


def cells(found: Figures) -> Row:
    return {
        "span_ms": milli(found.span),
        "compute_ms": milli(found.compute),
        "messages_ms": milli(found.communication),
        "hidden_ms": milli(found.hidden),
        "exposed_ms": milli(found.exposed),
        "copies_ms": milli(found.copies),
        "idle_ms": milli(found.idle.total),
        "idle_percent": f"{100 * found.idle.total / found.span:.1f}",
        "host_wait_ms": milli(found.idle.host_wait),
        "kernel_wait_ms": milli(found.idle.kernel_wait),
        "other_wait_ms": milli(found.idle.other),
        "lead_us": micro(found.lead.median) if found.lead else "",
    }


def messages(files: Sequence[Path]) -> list[Row]:
    """The collectives of all steps, with the time since the step's first work."""
    [trace] = read_devices(files[0])
    rows = []
    for step in trace.steps:
        work = of_step(trace, step)
        compute = [item.interval for item in work if item.kind == COMPUTE]
        for item in work:
            if not item.message:
                continue
            rows.append(
                {
                    "step": step.removeprefix("ProfilerStep#"),
                    "collective": item.message.kind,
                    "elements": str(item.message.elements),
                    "start_ms": milli(item.start - work[0].start),
                    "duration_ms": milli(item.end - item.start),
                    "hidden_ms": milli(length(intersect([item.interval], compute))),
                }
            )
    return rows


def buckets(files: Sequence[Path]) -> list[Row]:
    """The all-reduces of `A100_STEP`, each beside a bucket that is planned for them."""
    [trace] = read_devices(files[0])
    sent = [
        work.message.elements
        for work in of_step(trace, A100_STEP)
        if work.message and work.message.kind == "all-reduce"
    ]
    parameters = MODELS["resnet-50"].parameters
    sizes = [4 * parameter.elements for parameter in parameters]
    last_first = range(len(sizes) - 1, -1, -1)
    plan = plan_buckets(sizes, ["float32"] * len(sizes), last_first, 25 * MIB, MIB)
    return [
        {
            "elements": str(elements),
            "planned_elements": str(sum(parameters[i].elements for i in bucket)),
            "first_parameter": parameters[bucket[0]].name,
            "last_parameter": parameters[bucket[-1]].name,
        }
        for elements, bucket in zip(sent, plan, strict=True)
    ]


def phases(files: Sequence[Path]) -> list[Row]:
    """Of each step, the time from the start of its first message to the end of its last."""
    [trace] = read_devices(files[0])
    rows = []
    for step in trace.steps:
        work = of_step(trace, step)
        sent = [item for item in work if item.message]
        begin = sent[0].start
        end = sent[-1].end
        inside = [item.interval for item in work if begin <= item.start < end]
        rows.append(
            {
                "step": step.removeprefix("ProfilerStep#"),
                "messages": str(len(sent)),
                "span_ms": milli(end - begin),
                "messages_ms": milli(length(item.interval for item in sent)),
                "idle_ms": milli(end - begin - length(inside)),
            }
        )
    return rows


def events_of(step: str) -> Callable[[Sequence[Path]], list[Row]]:
    """All that ran on the device in a step, and what the host did meanwhile."""

    def events(files: Sequence[Path]) -> list[Row]:
        [device] = read_devices(files[0])
        host = read_trace(files[0])
        begin = _step(host, step)
        rows = [_host_row(found, begin) for found in outermost(host, begin)]
        rows += [_device_row(item, begin) for item in of_step(device, step)]
        return rows

    return events


def _step(host: Trace, name: str) -> Event:
    return next(step for step in recorded_steps(host) if step.name == name)


def outermost(host: Trace, step: Event) -> list[list[Event]]:
    """What each thread of the host did in the step, those in others left out.

    Those of a thread that follow each other and have the same name are together.
    """
    threads: dict[str, list[Event]] = {}
    process = step.thread.split("/")[0]
    for event in host.events:
        is_of_host = event.category in HOST_CATEGORIES
        is_in_step = step.start <= event.start < step.end
        if event is step or not is_of_host or not is_in_step:
            continue
        if event.thread.split("/")[0] != process:
            continue
        found = threads.setdefault(event.thread, [])
        if not found or event.start >= found[-1].end:
            found.append(event)
    together = []
    for found in threads.values():
        for _, alike in itertools.groupby(found, key=lambda event: event.name):
            together.append(list(alike))
    return sorted(together, key=lambda alike: alike[0].start)


def _host_row(found: Sequence[Event], step: Event) -> Row:
    on_loop = found[0].thread == step.thread
    return {
        "row": "host" if on_loop else "autograd",
        "kind": found[0].name.split("function: ")[-1].strip("# "),
        "start_us": micro(found[0].start - step.start),
        "duration_us": micro(found[-1].end - found[0].start),
        "launched_us": "",
        "elements": "",
    }


def _device_row(item: Work, step: Event) -> Row:
    elements = item.message.elements if item.message else None
    return {
        "row": f"stream {item.stream}",
        "kind": item.message.kind if item.message else item.kind,
        "start_us": micro(item.start - step.start),
        "duration_us": micro(item.end - item.start),
        "launched_us": ""
        if item.launched is None
        else micro(item.launched - step.start),
        "elements": "" if elements is None else str(elements),
    }


BUFFERS = "buffers, before the first layer"
INTO_BUCKETS = "copies of gradients into buckets"
OUT_OF_BUCKETS = "copies of gradients out of buckets"


def host_parts(files: Sequence[Path]) -> list[Row]:
    """What the host did in the step of `A100_STEP`, in its parts."""
    host = read_trace(files[0])
    step = _step(host, A100_STEP)
    inside = [
        event
        for event in host.events
        if event.category in HOST_CATEGORIES and step.start <= event.start < step.end
    ]

    def called(name: str) -> list[Event]:
        return [event for event in inside if event.name == name]

    [ddp] = called("DistributedDataParallel.forward")
    first_layer = called("aten::conv2d")[0]
    rows = [_part("step", step.end - step.start)]
    for name in ("forward", "backward", "optimizer"):
        [region] = called(f"## {name} ##")
        rows.append(_part(name, region.end - region.start))
    rows.append(_part(BUFFERS, first_layer.start - ddp.start))
    for part, name in (
        (INTO_BUCKETS, "torch::distributed::reducer::mul_out"),
        (OUT_OF_BUCKETS, "torch.distributed.ddp.reducer::copy_bucket_to_grad"),
    ):
        calls = called(name)
        rows.append(
            _part(part, sum(call.end - call.start for call in calls), len(calls))
        )
    return rows


def _part(part: str, seconds: float, calls: int = 1) -> Row:
    return {"part": part, "calls": str(calls), "duration_ms": milli(seconds)}


def bounds(files: Sequence[Path]) -> list[Row]:
    """How many times as fast the step would be at most without each of its parts."""
    host = read_trace(files[0])
    step = _step(host, A100_STEP)
    period = step.end - step.start
    [device] = read_devices(files[0])
    found = figures(of_step(device, A100_STEP))
    busy = found.span - found.idle.total
    host_ms = {row["part"]: float(row["duration_ms"]) for row in host_parts(files)}
    parts = {
        "time in which the GPU has no work": period - busy,
        BUFFERS: host_ms[BUFFERS] / 1e3,
        OUT_OF_BUCKETS: host_ms[OUT_OF_BUCKETS] / 1e3,
        "exposed messages": found.exposed,
    }
    return [
        {
            "part": part,
            "duration_ms": milli(seconds),
            "share_percent": f"{100 * seconds / period:.1f}",
            "at_most": f"{period / (period - seconds):.2f}",
        }
        for part, seconds in parts.items()
    ]


# Several ranks


def _ranks(files: Sequence[Path]) -> list[DeviceTrace]:
    """The traces in an archive, by rank."""
    traces = []
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(files[0]) as archive:
            archive.extractall(folder, filter="data")
        for file in Path(folder).rglob("*.json"):
            traces += read_devices(file)
    return sorted(traces, key=lambda trace: trace.rank or 0)


def ranks(files: Sequence[Path]) -> list[Row]:
    """The figures of each rank."""
    return [
        {"rank": str(trace.rank), **cells(figures(trace.work))}
        for trace in _ranks(files)
    ]


def collectives_of_ranks(files: Sequence[Path]) -> list[Row]:
    """Each collective on each rank, in microseconds since the first rank's first."""
    traces = _ranks(files)
    found = collectives(traces)
    sizes = [work.message.elements for work in traces[0].messages if work.message]
    begin = min(found[0].starts.values())
    return [
        {
            "number": str(number),
            "collective": collective.kind,
            "elements": str(sizes[number]),
            "rank": str(rank),
            "start_us": micro(collective.starts[rank] - begin),
            "duration_us": micro(seconds),
        }
        for number, collective in enumerate(found)
        for rank, seconds in collective.seconds.items()
    ]


# Flight recorders


class _Refusing(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries, and executes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected plain values, found {module}.{name}")


def pending(files: Sequence[Path]) -> list[Row]:
    """What each rank's flight recorder holds: the oldest collective that has not ended."""
    rows = []
    for file in sorted(files, key=lambda file: int(file.name.split("_")[-1])):
        with open(file, "rb") as stream:
            dump = _Refusing(stream).load()
        oldest = min(
            dump["entries"], key=lambda entry: entry["record_id"], default=None
        )
        row = {"rank": file.name.split("_")[-1], "pending": str(len(dump["entries"]))}
        rows.append({**row, **_told(oldest, dump["pg_config"])})
    return rows


def _told(entry: dict[str, Any] | None, groups: dict[str, Any]) -> Row:
    if entry is None:
        return {"collective": "", "group": "", "ranks_of_group": "", "state": ""}
    number, group = entry["process_group"]
    return {
        "collective": entry["profiling_name"].removeprefix("nccl:").strip("_"),
        "group": group,
        "ranks_of_group": groups[number]["ranks"].strip("[]"),
        "state": entry["state"],
    }


# Memory


def snapshots(files: Sequence[Path]) -> list[Row]:
    """What the allocator holds in each snapshot."""
    rows = []
    for file in files:
        found = read_snapshot(file)
        row = {
            f"{what}_gib": f"{getattr(found, what) / GIB:.2f}"
            for what in ("reserved", "peak", "live", "requested")
        }
        rows.append(row | {"gaps": str(len(found.free))})
    return rows


def live_tensors(files: Sequence[Path]) -> list[Row]:
    """How many tensors of each size are live, those with the most bytes first."""
    found = read_snapshot(files[0])
    return [
        {
            "tensors": str(count),
            "size_mib": f"{size / 2**20:.2f}",
            "together_gib": f"{size * count / GIB:.2f}",
        }
        for size, count in by_bytes(found)
        if size >= 2**20
    ]


MIB_COLUMNS = {
    "parameters": ("parameters",),
    "momentum": ("optimizer state",),
    "gradients": ("gradients",),
    "images": ("inputs",),
    "activations": ("activations",),
    "other": ("temporaries", "autograd's own", "unknown"),
}


def memory_of_step(files: Sequence[Path]) -> list[Row]:
    """What a step holds: the fullest moment of each millisecond."""
    step = steps_of_timeline(read_timeline(files[0]))[0]
    begin = step[0].time
    rows = []
    for millisecond, moments in itertools.groupby(
        step, key=lambda moment: int(1e3 * (moment.time - begin))
    ):
        fullest = max(moments, key=lambda moment: moment.total)
        held = dict(zip(KINDS, fullest.held, strict=True))
        row = {"at_ms": str(millisecond)}
        for column, kinds in MIB_COLUMNS.items():
            row[f"{column}_mib"] = f"{sum(held[kind] for kind in kinds) / MIB:.1f}"
        rows.append(row | {"all_mib": f"{fullest.total / MIB:.1f}"})
    return rows


# A range of Nsight Systems


def backward(files: Sequence[Path]) -> list[Row]:
    """The messages of each rank's backward pass, and how much of them computation hides."""
    rows = []
    for found in read_range(files[0], "backward pass"):
        sent = length(union(found.messages))
        hidden = length(intersect(union(found.messages), union(found.compute)))
        rows.append(
            {
                "rank": str(found.device),
                "messages": str(len(found.messages)),
                "sent_mib": f"{sum(found.sizes) / MIB:.2f}",
                "compute_ms": milli(1e-9 * length(union(found.compute))),
                "messages_ms": milli(1e-9 * sent),
                "hidden_ms": milli(1e-9 * hidden),
                "exposed_ms": milli(1e-9 * (sent - hidden)),
            }
        )
    return rows


# Steps, timed


WAYS = {
    "naive": "a message per parameter, after backward",
    "flatten": "one message, after backward",
    "overlap": "a message per parameter, during backward",
    "overlap_sharded": "the same, optimizer's state in shards",
}


def ways(files: Sequence[Path]) -> list[Row]:
    """The steps of each way to send the gradients, and what is held after one."""
    [report] = [file for file in files if file.suffix == ".md"]
    sharded, whole = report.read_text(encoding="utf-8").split("##Non-Sharded")
    rows = []
    for name, way in WAYS.items():
        [file] = [file for file in files if f"_xl_{name}_ws" in file.name]
        with open(file, encoding="utf-8", newline="") as lines:
            times = [float(row["total_ms"]) for row in csv.DictReader(lines)]
        held = _held_after_steps(sharded if "sharded" in name else whole)
        rows.append(
            {
                "way": way,
                "step_ms": f"{statistics.mean(times):.1f}",
                "shortest_ms": f"{min(times):.1f}",
                "longest_ms": f"{max(times):.1f}",
                "held_gib": held,
            }
        )
    return rows


def _held_after_steps(text: str) -> str:
    """The most that a rank has allocated after the optimizer's step."""
    found = re.finditer(r"after_optimizer_step:\s+allocated: ([\d.]+) GB", text)
    return max((match.group(1) for match in found), key=float)


def scaling(files: Sequence[Path]) -> list[Row]:
    """Images a second, and of eight GPUs the share of eight times those of one."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    alone = {_kind(run): run for run in runs if run["world_size"] == 1}
    rows = []
    for run in runs:
        rate = run["images_per_sec_global"]
        share = rate / run["world_size"] / alone[_kind(run)]["images_per_sec_global"]
        rows.append(
            {
                "gpu": run["device_name"],
                "model": run["model"],
                "scaling": run["scaling_mode"],
                "precision": run["precision"],
                "gpus": str(run["world_size"]),
                "images_per_gpu": str(run["batch_size_per_gpu"]),
                "images_per_s": f"{rate:.0f}",
                "efficiency_percent": f"{100 * share:.1f}",
            }
        )
    return rows


def _kind(run: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        run[key] for key in ("device_name", "model", "scaling_mode", "precision")
    )


A100_STEP = "ProfilerStep#5"
V100_STEP = "ProfilerStep#3"

MAKERS: dict[str, Callable[[Sequence[Path]], list[Row]]] = {
    "resnet50_2xa100_steps": steps,
    "resnet50_2xa100_messages": messages,
    "resnet50_2xa100_host": host_parts,
    "resnet50_2xa100_bounds": bounds,
    "resnet50_2xa100_buckets": buckets,
    "resnet50_2xa100_events": events_of(A100_STEP),
    "compiled_2xv100_steps": steps,
    "compiled_2xv100_phases": phases,
    "compiled_2xv100_events": events_of(V100_STEP),
    "dlrm_8xv100_ranks": ranks,
    "dlrm_8xv100_collectives": collectives_of_ranks,
    "hang_16_ranks": pending,
    "memory_snapshot": snapshots,
    "memory_snapshot_tensors": live_tensors,
    "resnet50_memory": memory_of_step,
    "hooks_2xrtx3090_backward": backward,
    "transformer_2xb200_ways": ways,
    "ddp_scaling_a100_v100": scaling,
}


def main(folder: str) -> None:
    """Write all tables."""
    for name in MAKERS:
        text = table(name, Path(folder))
        (TABLES / f"{name}.csv").write_text(text, encoding="utf-8")
        print(f"{name}: {text.count(chr(10)) - 1} rows")


if __name__ == "__main__":
    main(sys.argv[1])
