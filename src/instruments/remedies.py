"""Remedies for a slow step, each tried against the step as repaired so far.

The step as it is and the step with one more remedy take turns, pass by pass, so that
whatever else the machine does slows both. Each round gives one ratio of their speeds in
real tokens per second, padding left out.
"""

import gc
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from instruments.breakdown import Breakdown, break_down
from instruments.flops import measured_peak_flops, peak_flops
from instruments.profiling import Profiler, Schedule
from instruments.slow_step import Pairs, Settings, Training
from instruments.trace import Trace, read_trace
from miniddp.process import device

RECORDED_STEPS = 8
USELESS_KEPT = 0.02
"""Of a hundred remedies without effect, so many may be kept, as a share."""


@dataclass(frozen=True)
class Remedy:
    """One change of the settings, and what it saves."""

    name: str
    saves: str
    change: dict[str, object]
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def changes_updates(self) -> bool:
        """Whether another number of pairs goes into an update."""
        return not self.change.keys().isdisjoint({"batch_size", "accumulation"})

    @property
    def changes_losses(self) -> bool:
        """Whether a step takes other pairs, so that its loss is another one."""
        return self.changes_updates or "by_length" in self.change


def remedies(large: int) -> list[Remedy]:
    """All that this device can take; the largest batch has `large` pairs."""
    gpu_only = ("cuda",)
    possible = [
        Remedy("batches of like lengths", "padding", {"by_length": True}),
        Remedy("buckets during backward", "messages, waiting", {"buckets": True}),
        Remedy("TF32 products", "bits", {"tf32": True}, gpu_only),
        Remedy("bf16 autocast", "bits", {"bf16": True}),
        Remedy("SDPA attention", "kernels", {"attention": "sdpa"}),
        Remedy("fused AdamW", "kernels", {"fused_optimizer": True}),
        Remedy("pinned memory", "waiting for copies", {"pinned": True}, gpu_only),
        Remedy(
            "no .item() in the step",
            "waiting for the device",
            {"read_every_loss": False},
            gpu_only,
        ),
        Remedy("torch.compile", "kernels", {"compiled": True}),
        Remedy(f"{large} pairs in a batch", "messages, updates", {"batch_size": large}),
        Remedy("accumulation of 4", "messages, updates", {"accumulation": 4}),
    ]
    return [remedy for remedy in possible if device().type in remedy.devices]


@dataclass(frozen=True)
class State:
    """A way to train, measured.

    Attributes:
        seconds: Of a pass.
        breakdown: The parts of a step, from this rank's trace.
        exposed: The share of exposed messages on the rank where it is smallest, which
            no rank waits for.
    """

    settings: Settings
    seconds: float
    tokens: int
    computed: int
    losses: list[float]
    breakdown: Breakdown
    exposed: float

    @property
    def padding(self) -> float:
        """The share of the computed tokens that are none."""
        return 1 - self.tokens / self.computed

    def share(self, family: str) -> float:
        """The part of this rank's step that a family of operators takes."""
        return self.breakdown.families[family].share

    def parts(self) -> dict[str, float]:
        """Shares of a step's time. What is hidden is in the work that hides it."""
        families = self.breakdown.families
        work = [name for name in families if name not in ("communication", "idle")]
        work.sort(key=self.share, reverse=True)
        return {
            "message, and no other work": self.breakdown.exposed.share,
            **{name: self.share(name) for name in work},
            "nothing: Python, waiting": self.share("idle"),
        }


@dataclass(frozen=True)
class Trial:
    """What a remedy brought to a step, or why it did not run.

    Attributes:
        step: The step as repaired so far.
        ratios: How many times faster it was in each round.
        loss_difference: The largest, in the first pass.
        tried: The step with the remedy.
    """

    remedy: Remedy
    step: State
    ratios: list[float] = field(default_factory=list)
    loss_difference: float = 0.0
    tried: State | None = None
    failure: str = ""

    @property
    def avoidable(self) -> float | None:
        return avoidable(self.remedy.change, self.step)

    @property
    def kept(self) -> bool:
        return bool(self.ratios) and pays(self.ratios)


@dataclass(frozen=True)
class Repair:
    """What one rank saw.

    Attributes:
        faster: The ratios of the repaired step's speed and the slow one's.
        faster_alike: Those before the remedies that change the updates.
        peaks: FLOP/s of this rank's device, for the slow step and for the repaired one.
    """

    before: State
    trials: list[Trial]
    after: State
    faster_alike: list[float]
    faster: list[float]
    peaks: tuple[float, float]


def repair(
    rank: int,
    template: nn.Module,
    pairs: Pairs,
    tried: Sequence[Remedy],
    rounds: int,
    settings: Settings,
) -> Repair:
    """Try one remedy after the other, and keep those that pay."""
    slow = kept = Training(settings, template, pairs, rank)
    before = state = look_at(slow, rounds)
    trials: list[Trial] = []
    faster_alike: list[float] = []
    for remedy in tried:
        if remedy.changes_updates and not faster_alike:
            faster_alike = compare(slow, kept, rounds)
        changed = replace(kept.settings, **remedy.change)  # type: ignore[arg-type]
        try:
            new = Training(changed, template, pairs, rank)
            ratios = compare(kept, new, rounds)
            found = look_at(new, rounds)
        except (RuntimeError, ImportError, OSError) as error:
            trials.append(Trial(remedy, state, failure=one_line(error)))
            continue
        difference = largest_difference(kept.losses, new.losses)
        trials.append(Trial(remedy, state, ratios, difference, found))
        if trials[-1].kept:
            kept = new
            state = found
        del new
        gc.collect()
    return Repair(
        before=before,
        trials=trials,
        after=state,
        faster_alike=faster_alike,
        peaks=(peak(slow.settings), peak(kept.settings)),
        faster=compare(slow, kept, rounds),
    )


def compare(old: Training, new: Training, rounds: int) -> list[float]:
    """How many times faster the new way is in each round; they take turns to begin."""
    ratios = []
    for number in range(rounds):
        order = (new, old) if number % 2 else (old, new)
        speed = {way: way.tokens / way.pass_seconds() for way in order}
        ratios.append(speed[new] / speed[old])
    return ratios


def chance(faster: int, rounds: int) -> float:
    """How often a remedy without effect is faster in `faster` of `rounds`, or in more.

    It is a sign test: without an effect each round is as likely to be faster as slower.
    """
    ways = sum(math.comb(rounds, count) for count in range(faster, rounds + 1))
    return float(ways / 2**rounds)


def needed(rounds: int) -> int:
    """In how many rounds a remedy has to be faster, so that few useless ones are kept.

    Raises `ValueError` if the rounds are too few to tell.
    """
    for faster in range(rounds + 1):
        if chance(faster, rounds) <= USELESS_KEPT:
            return faster
    raise ValueError(f"{rounds} rounds are too few to tell a remedy from none")


def pays(ratios: list[float]) -> bool:
    """Whether it was faster in so many rounds that this is no accident."""
    return sum(ratio > 1 for ratio in ratios) >= needed(len(ratios))


def look_at(training: Training, rounds: int) -> State:
    """Record some steps, and time some passes."""
    breakdown = break_down(trace_of(training))
    exposed = torch.tensor(breakdown.exposed.share, device=device())
    dist.all_reduce(exposed, dist.ReduceOp.MIN)
    return State(
        settings=training.settings,
        seconds=statistics.median(training.pass_seconds() for _ in range(rounds)),
        tokens=training.tokens,
        computed=training.computed,
        losses=training.losses,
        breakdown=breakdown,
        exposed=exposed.item(),
    )


def trace_of(training: Training) -> Trace:
    """Some steps, after one that warms up the profiler."""
    schedule = Schedule(skip_first=0, wait=0, warmup=1, active=RECORDED_STEPS)
    batches = (1 + RECORDED_STEPS) * training.settings.accumulation
    with (
        tempfile.TemporaryDirectory() as folder,
        Profiler(folder, schedule, all_ranks=True) as profiler,
    ):
        training.train(batches, profiler)
        trace = read_trace(profiler.traces[0])
    kernels_and_host = [
        event for event in trace.events if not event.name.startswith("nccl:")
    ]
    return Trace(kernels_and_host, trace.rank, trace.world_size)


def avoidable(change: dict[str, object], step: State) -> float | None:
    """The share of the step that a change aims at, and can save at most.

    Padding is computed, but neither sent nor part of the update.
    """
    match change:
        case {"by_length": True}:
            return step.padding * (1 - step.exposed - step.share("optimizer"))
        case {"buckets": True}:
            return step.exposed
        case {"fused_optimizer": True}:
            return step.share("optimizer")
        case {"accumulation": int(passes)}:
            return (1 - 1 / passes) * (step.exposed + step.share("optimizer"))
    return None


def largest_difference(before: Sequence[float], after: Sequence[float]) -> float:
    return max(abs(b - a) for a, b in zip(before, after, strict=True))


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def peak(settings: Settings) -> float:
    """FLOP/s of this rank's device in a step's precision, all ranks at once.

    By NVIDIA's data sheet in bf16; of what has none, measured.
    """
    known = None
    if device().type == "cuda":
        known = peak_flops(torch.cuda.get_device_name())
    dist.barrier()
    if known is not None:
        return known
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    return measured_peak_flops(device(), dtype, size=1024, repeats=20)
