"""A recorded step as bars of three lanes: regions, work on the device, messages."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from instruments.breakdown import (
    families_of,
    recorded_steps,
    region_spans,
    work_of,
)
from instruments.families import COMMUNICATION
from instruments.intervals import Interval, union
from instruments.trace import Event, Trace

REGIONS = "regions"
WORK = "work"
MESSAGES = "messages"
LANES = (REGIONS, WORK, MESSAGES)


class Bar(NamedTuple):
    """Something that took time; `start` is in seconds since the step began."""

    lane: str
    start: float
    seconds: float
    label: str = ""


def bars_of(trace: Trace, step: Event, regions: Sequence[str], gap: float) -> list[Bar]:
    """What began in the step; gaps of at most `gap` seconds in a lane are filled.

    Only the bars of the `regions` have a label. The work is what the GPU ran if it ran
    anything, else the operators of the process.
    """
    families = families_of(trace)
    rows = {WORK: work_of(families), MESSAGES: families[COMMUNICATION]}
    spans = region_spans(trace)
    found = []
    for name in regions:
        found += [(REGIONS, name, interval) for interval in spans.get(name, [])]
    for lane, intervals in rows.items():
        found += [(lane, "", interval) for interval in without_gaps(intervals, gap)]
    return [
        Bar(lane, start - step.start, end - start, label)
        for lane, label, (start, end) in found
        if step.start <= start < step.end
    ]


def without_gaps(intervals: Iterable[Interval], gap: float) -> list[Interval]:
    """The intervals, joined where no more than `gap` seconds lie between them."""
    longer = [(start, end + gap) for start, end in union(intervals)]
    return [(start, end - gap) for start, end in union(longer)]


def usual_step(trace: Trace) -> Event:
    """The recorded step whose messages take longer than in half of the others."""
    messages = union(families_of(trace)[COMMUNICATION])

    def seconds_of_messages(step: Event) -> float:
        begun = [
            end - start for start, end in messages if step.start <= start < step.end
        ]
        return sum(begun)

    steps = sorted(recorded_steps(trace), key=seconds_of_messages)
    return steps[len(steps) // 2]


NARROWEST_LABELLED = 0.1
"""Of the longest step: no label fits into less."""

SMALLEST_GAP = 1 / 300
"""Of the longest step: nobody would see a smaller one."""


def draw(
    axes: Any,
    traces: dict[str, Trace],
    steps: dict[str, Event],
    regions: dict[str, bool],
    colors: Sequence[str],
) -> None:
    """Three rows for each trace, in milliseconds; its rank decides the colour.

    `axes` are matplotlib's. Of the `regions` those that are true get a label.
    """
    longest = max(step.end - step.start for step in steps.values())
    heights = {}
    for row, (name, trace) in enumerate(traces.items()):
        color = colors[trace.rank]
        for number, lane in enumerate(LANES):
            heights[f"{name}: {lane}"] = 4 * row + number
        for bar in bars_of(trace, steps[name], list(regions), SMALLEST_GAP * longest):
            height = heights[f"{name}: {bar.lane}"]
            left = 1e3 * bar.start
            width = 1e3 * bar.seconds
            look = {"alpha": 0.75, "edgecolor": "none"}
            if bar.lane == REGIONS:
                look = {"alpha": 0.3, "edgecolor": color}
            box = (height - 0.38, 0.76)
            axes.broken_barh([(left, width)], box, facecolor=color, **look)
            is_wide = bar.seconds > NARROWEST_LABELLED * longest
            if is_wide and regions.get(bar.label):
                middle = left + width / 2
                axes.text(
                    middle, height, bar.label, ha="center", va="center", fontsize=9
                )
    axes.set(yticks=list(heights.values()), yticklabels=list(heights))
    axes.set(xlabel="ms since the step began", xlim=(0, 1.02e3 * longest))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
