"""The tables that `python -m instruments.trace FILE…` prints."""

import argparse
import statistics
import sys
from collections.abc import Sequence

from instruments.trace import TraceError
from instruments.trace_figures import (
    Collective,
    Figures,
    Idle,
    alike,
    by_rank,
    collectives,
    figures,
    figures_of_step,
    idle_by_stream,
    late_rank,
    waited_for,
)
from instruments.trace_gpu import DeviceTrace, read_devices

MOST_ROWS = 30
"""Of messages and of collectives."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of the files; exit with 2 if one cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m instruments.trace",
        description="Where a GPU's time went, from traces of torch.profiler.",
    )
    parser.add_argument("files", nargs="+", help="one trace, or one of each rank")
    options = parser.parse_args(arguments)
    try:
        traces = []
        for file in options.files:
            traces += read_devices(file)
        traces.sort(key=lambda trace: -1 if trace.rank is None else trace.rank)
        print(report(traces))
    except TraceError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def report(traces: Sequence[DeviceTrace]) -> str:
    """All about one device; of several, a line each and what they did together."""
    if len(traces) == 1:
        return "\n".join(lines_of_one(traces[0]))
    of_one_file = len({trace.path for trace in traces}) == 1
    if of_one_file and not all(trace.messages for trace in traces):
        return "\n".join(lines_of_devices(traces))
    return "\n".join([*lines_of_ranks(traces), *lines_of_collectives(traces)])


def lines_of_one(trace: DeviceTrace) -> list[str]:
    whole = figures(trace.work)
    rows = {step: figures_of_step(trace, step) for step in trace.steps}
    rows["all"] = whole
    lines = [title(trace), ""]
    lines += table_of_figures("step", rows)
    lines += ["", "idle, in ms                  host late  gaps under 30 µs  other"]
    lines.append(idle_row("on all streams", whole.idle))
    for stream, idle in idle_by_stream(trace.work).items():
        lines.append(idle_row(f"on stream {stream}", idle))
    if whole.lead:
        lines += [
            "",
            f"From launch to start a kernel waits {1e3 * whole.lead.median:,.3f} ms "
            f"(median) and {1e3 * whole.lead.largest:,.3f} ms at most: "
            "so far is the host ahead.",
        ]
    return [*lines, "", *lines_of_messages(trace)]


def lines_of_devices(traces: Sequence[DeviceTrace]) -> list[str]:
    """Of one process that used several devices."""
    rows = {name(trace): figures(trace.work) for trace in traces}
    table = table_of_figures("trace", rows)
    return [title(traces[0]), "", *table, "", "no messages between the devices"]


def lines_of_ranks(traces: Sequence[DeviceTrace]) -> list[str]:
    """A row each; a rank that no file told stands before its file."""
    rows = {}
    for rank, trace in by_rank(traces).items():
        told = (
            f"rank {rank}" if trace.rank == rank else f"rank {rank} ({trace.path.name})"
        )
        rows[f"{told}, device {trace.device}"] = figures(trace.work)
    return [title(traces[0]), "", *table_of_figures("trace", rows)]


def title(trace: DeviceTrace) -> str:
    found = [f"{trace.path.name}: {name(trace)}"]
    if trace.world_size is not None:
        found.append(f"world size {trace.world_size}")
    found.append(trace.hardware)
    if trace.nccl:
        found.append(f"NCCL {trace.nccl}")
    return ", ".join(part for part in found if part)


def name(trace: DeviceTrace) -> str:
    if trace.rank is None:
        return f"device {trace.device}"
    return f"rank {trace.rank}, device {trace.device}"


def table_of_figures(first: str, rows: dict[str, Figures]) -> list[str]:
    """Milliseconds, a row each."""
    head = ("span", "compute", "messages", "hidden", "exposed", "copies", "idle")
    width = max(len(label) for label in [f"{first}, in ms", *rows])
    lines = [f"{f'{first}, in ms':{width}}" + "".join(f"{part:>10}" for part in head)]
    for label, row in rows.items():
        cells = (
            row.span,
            row.compute,
            row.communication,
            row.hidden,
            row.exposed,
            row.copies,
            row.idle.total,
        )
        numbers = "".join(f" {1e3 * cell:9,.2f}" for cell in cells)
        share = row.idle.total / row.span if row.span else 0.0
        lines.append(f"{label:{width}}{numbers}  {share:4.0%}")
    return lines


def idle_row(label: str, idle: Idle) -> str:
    return (
        f"{label:24} {1e3 * idle.host_wait:13,.2f}  {1e3 * idle.kernel_wait:16,.2f}"
        f"  {1e3 * idle.other:5,.2f}"
    )


def lines_of_messages(trace: DeviceTrace) -> list[str]:
    found = alike(trace)
    if not found:
        return ["no messages"]
    lines = [
        "messages             elements        MiB  ranks  count  median ms  all ms"
    ]
    for message, seconds in found[:MOST_ROWS]:
        elements = "not told" if message.elements is None else f"{message.elements:,}"
        size = message.size_bytes
        mebibytes = "" if size is None else f"{size / 2**20:,.3f}"
        lines.append(
            f"{message.kind:16} {elements:>12} {mebibytes:>10}"
            f"  {message.group_size or '':>5}  {len(seconds):5}"
            f"  {1e3 * statistics.median(seconds):9,.3f}  {1e3 * sum(seconds):6,.2f}"
        )
    if len(found) > MOST_ROWS:
        lines.append(f"… and {len(found) - MOST_ROWS} other sizes")
    return lines


def lines_of_collectives(traces: Sequence[DeviceTrace]) -> list[str]:
    """Who was last at each collective, and whether one rank is late."""
    together = collectives(traces)
    lines = [
        "",
        "collective         shortest on     µs  longest on     µs  ends differ by µs",
    ]
    for collective in together[:MOST_ROWS]:
        lines.append(collective_row(collective))
    if len(together) > MOST_ROWS:
        lines.append(f"… and {len(together) - MOST_ROWS} more")
    return [*lines, "", verdict(together), *doubts(traces, together)]


def verdict(together: Sequence[Collective]) -> str:
    late = late_rank(together)
    if late is None:
        return "No rank is late: for none did the others wait longer than for the rest."
    times = [collective.last for collective in together].count(late)
    waited = waited_for(together)
    share = waited[late] / sum(waited.values())
    each = waited[late] / (len(together[0].starts) - 1)
    return (
        f"Rank {late} is late: at {times} of {len(together)} collectives its kernel "
        f"was the shortest, and each of the others waited {1e3 * each:,.2f} ms for it, "
        f"{share:.0%} of their waiting."
    )


def doubts(traces: Sequence[DeviceTrace], together: Sequence[Collective]) -> list[str]:
    """Why the verdict may be wrong."""
    lines = []
    world_size = traces[0].world_size
    if world_size is not None and len(traces) < world_size:
        lines.append(
            f"The traces are of {len(traces)} of {world_size} ranks: one without may be "
            "later still."
        )
    apart = sum(not collective.together for collective in together)
    if apart > len(together) / 2:
        lines.append(
            f"At {apart} of {len(together)} collectives the ranks' kernels have no "
            "moment in common: the clocks differ, or the files hold different steps "
            "and tell nothing together."
        )
    return lines


def collective_row(collective: Collective) -> str:
    seconds = collective.seconds
    longest = max(seconds, key=lambda rank: seconds[rank])
    shortest = collective.last
    return (
        f"{collective.kind:18} {f'rank {shortest}':>11} {1e6 * seconds[shortest]:6,.0f}"
        f" {f'rank {longest}':>11} {1e6 * seconds[longest]:6,.0f}"
        f" {1e6 * collective.spread_of_ends:18,.0f}"
    )


if __name__ == "__main__":
    main()
