# %% [markdown]
# # A slow step, repaired measure by measure
#
# A training step as it is often written first: full precision, one message per parameter, every
# pair padded to the same length, the loss read in every step. Then one measure after the other,
# each on top of those before it, all in the same process. A measure that this machine cannot take
# is a row that says why.
#
# With a GPU: SmolLM2-360M's architecture with random weights, one rank over NCCL. Without: a small
# model of the same architecture, two ranks over Gloo, and the measures that a CPU can take.

# %% name="setup"
import copy
import gc
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 prints a line per recording otherwise

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

import miniddp
from book import FOREGROUND, LINE, data_dir, figure, provenance, record, table
from instruments.breakdown import Breakdown, break_down
from instruments.clock import clock
from instruments.flops import measured_peak_flops, peak_flops, training_flops, utilisation
from instruments.profiling import Profiler, Schedule, region
from instruments.trace import Trace, read_trace
from miniddp.data import encode, load_mrpc
from miniddp.model import load_model, load_tokenizer
from miniddp.process import device

on_gpu = device().type == "cuda"
SIZE = "360m" if on_gpu else "tiny"
WORLD_SIZE, BACKEND = (1, "nccl") if on_gpu else (2, "gloo")
SMALL, LARGE, LARGEST = (8, 128, 256) if on_gpu else (4, 16, 16)
MICRO_BATCHES = 16 if on_gpu else 8  # in a pass
PASSES = 5
MAX_LENGTH = 128
provenance(device=device(), world_size=WORLD_SIZE, backend=BACKEND)
pairs = load_mrpc(data_dir())
sentences = pairs[:]
tokenizer = load_tokenizer(sentences["sentence1"] + sentences["sentence2"], SIZE, pretrained=False)
encoded = list(encode(pairs, tokenizer, MAX_LENGTH))
lengths = sorted(len(row["input_ids"]) for row in encoded)

Row = dict[str, list[int]]
Batch = dict[str, Tensor]

median = lengths[len(lengths) // 2]
print(f"{len(encoded)} pairs of {lengths[0]} to {lengths[-1]} tokens, median {median}")
record(
    model=SIZE,
    ranks=WORLD_SIZE,
    small=SMALL,
    large=LARGE,
    max_length=MAX_LENGTH,
    passes=PASSES,
    micro_batches=MICRO_BATCHES,
    median_length=median,
)

# %% [markdown]
# ## The measures
#
# Settings say how a step is taken. A measure changes some of them.


# %% name="settings"
@dataclass(frozen=True)
class Settings:
    """How a training step is taken. The defaults are the slow step."""

    batch_size: int = SMALL
    tf32: bool = False
    bf16: bool = False
    attention: str = "eager"
    fused_optimizer: bool = False
    pinned: bool = False
    read_every_loss: bool = True
    buckets: bool = False
    by_length: bool = False
    compiled: bool = False
    cuda_graphs: bool = False
    accumulation: int = 1


@dataclass(frozen=True)
class Measure:
    """One change of the settings. An aside is measured, and not carried on."""

    name: str
    change: dict[str, object] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    aside: bool = False


GPU_ONLY = ("cuda",)
ALL_MEASURES = [
    Measure("the slow step"),
    Measure("TF32 products", {"tf32": True}, GPU_ONLY),
    Measure("bf16 autocast", {"bf16": True}),
    Measure("SDPA attention", {"attention": "sdpa"}),
    Measure("fused AdamW", {"fused_optimizer": True}),
    Measure("pinned memory, asynchronous copies", {"pinned": True}, GPU_ONLY),
    Measure("no .item() in the step", {"read_every_loss": False}, GPU_ONLY),
    Measure("buckets: DistributedDataParallel", {"buckets": True}),
    Measure(f"{LARGE} pairs in a batch", {"batch_size": LARGE}),
    Measure("batches of like lengths", {"by_length": True}),
    Measure("torch.compile, layer by layer", {"compiled": True}, GPU_ONLY),
    Measure(f"{LARGEST} pairs in a batch", {"batch_size": LARGEST}, GPU_ONLY),
    Measure("accumulation of 2", {"accumulation": 2}),
    Measure("accumulation of 4", {"accumulation": 4}),
    Measure(
        f"aside: CUDA graphs, {SMALL} pairs of one length",
        {
            "batch_size": SMALL,
            "by_length": False,
            "compiled": False,
            "accumulation": 1,
            "cuda_graphs": True,
        },
        GPU_ONLY,
        aside=True,
    ),
]
MEASURES = [measure for measure in ALL_MEASURES if device().type in measure.devices]
for measure in MEASURES:
    print(measure.name)

# %% [markdown]
# ## The data
#
# The slow way: pairs in random order, all padded to the greatest length. The other way: a batch has
# pairs of like lengths, and is padded to the longest of them.


# %% name="data"
def micro_batches(settings: Settings, rank: int) -> list[list[Row]]:
    """This rank's part of each joined batch of a pass."""
    rows = sorted(encoded, key=lambda row: len(row["input_ids"]))
    shuffle = random.Random(0).shuffle
    if not settings.by_length:
        shuffle(rows)
    size = WORLD_SIZE * settings.batch_size
    joined = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
    evenly = [joined[i * len(joined) // MICRO_BATCHES] for i in range(MICRO_BATCHES)]
    shuffle(evenly)
    return [batch[rank::WORLD_SIZE] for batch in evenly]


def pad(rows: list[Row], settings: Settings) -> Batch:
    how = (
        {"padding": "longest", "pad_to_multiple_of": 8}
        if settings.by_length
        else {"padding": "max_length", "max_length": MAX_LENGTH}
    )
    batch = dict(tokenizer.pad(rows, return_tensors="pt", **how))
    return (
        {name: tensor.pin_memory() for name, tensor in batch.items()} if settings.pinned else batch
    )


def load(chunks: list[list[Row]], settings: Settings) -> Iterator[Batch]:
    for rows in chunks:
        with region("load_batch"):
            batch = pad(rows, settings)
        yield batch


# %% [markdown]
# ## One pass
#
# The training loop. Every measure is a line in it, or in what prepares it.


# %% name="prepare"
def configure(module: nn.Module, attention: str) -> None:
    module.config._attn_implementation = attention
    module.config.use_cache = False  # what generation of text keeps, and training does not need


def prepare(settings: Settings, template: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The wrapped model and its optimizer."""
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    module = copy.deepcopy(template).to(device())
    configure(module, settings.attention)
    if settings.compiled:
        for layer in module.model.layers:
            layer.compile()
    if settings.cuda_graphs:
        module.compile(mode="reduce-overhead")
    how = {"fused": True} if settings.fused_optimizer else {"foreach": False}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, **how)
    wrapper = miniddp.DistributedDataParallel if settings.buckets else miniddp.SimpleDDP
    return wrapper(module), optimizer


# %% name="train-pass"
def train_pass(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    chunks: list[list[Row]],
    settings: Settings,
    profiler: Profiler | None = None,
) -> list[float]:
    """Train on the chunks; returns the loss of each."""
    losses = []
    for number, host_batch in enumerate(load(chunks, settings), 1):
        is_last = number % settings.accumulation == 0
        with region("data_movement"):
            batch = {
                name: tensor.to(device(), non_blocking=settings.pinned)
                for name, tensor in host_batch.items()
            }
        with nullcontext() if is_last else model.no_sync():
            autocast = torch.autocast(device().type, torch.bfloat16, enabled=settings.bf16)
            with region("forward"), autocast:
                loss = model(**batch).loss / settings.accumulation
            with region("backward"):
                loss.backward()
        loss = loss.detach() * settings.accumulation
        with region("read_loss"):
            losses.append(loss.item() if settings.read_every_loss else loss.clone())
        if not is_last:
            continue
        with region("sync_grads"):
            if not settings.buckets:
                model.sync_gradients()
        with region("opt_step"):
            optimizer.step()
            optimizer.zero_grad()
        if profiler is not None:
            profiler.step()
    return losses if settings.read_every_loss else torch.stack(losses).tolist()


# %% [markdown]
# ## What is measured
#
# One pass to warm up, then five on the clock, of which the fastest counts: other programs on the
# machine only ever make a pass slower. Then three steps under the profiler, of which two are
# recorded. The clock waits for the device. Seconds are those of the slowest rank.


# %% name="measure"
@dataclass(frozen=True)
class Result:
    """What one rank measured. Tokens are those of a pass; computed ones include the padding."""

    settings: Settings
    seconds: float
    pairs: int
    tokens: int
    computed_tokens: int
    losses: list[float]
    breakdown: Breakdown
    peak_gib: float | None


def seconds_of(settings: Settings, *training: object) -> tuple[float, list[float]]:
    dist.barrier()
    start = clock()
    losses = train_pass(*training, settings)
    seconds = torch.tensor(clock() - start, device=device())
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), losses


def trace_of(settings: Settings, *training: object) -> Trace:
    model, optimizer, chunks = training
    schedule = Schedule(skip_first=0, wait=0, warmup=1, active=2)
    with (
        tempfile.TemporaryDirectory() as folder,
        Profiler(folder, schedule, all_ranks=True) as profiler,
    ):
        three_steps = (3 * settings.accumulation * chunks)[: 3 * settings.accumulation]
        train_pass(model, optimizer, three_steps, settings, profiler)
        trace = read_trace(profiler.traces[0])
    events = [event for event in trace.events if not event.name.startswith("nccl:")]  # no kernels
    return Trace(events, trace.rank, trace.world_size)


def run_measure(settings: Settings, template: nn.Module, rank: int) -> Result:
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model, optimizer = prepare(settings, template)
    chunks = micro_batches(settings, rank)
    training = model, optimizer, chunks
    _, first_losses = seconds_of(settings, *training)
    seconds = min(seconds_of(settings, *training)[0] for _ in range(PASSES))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return Result(
        settings=settings,
        seconds=seconds,
        pairs=sum(map(len, chunks)),
        tokens=sum(len(row["input_ids"]) for rows in chunks for row in rows),
        computed_tokens=sum(pad(rows, settings)["input_ids"].numel() for rows in chunks),
        losses=first_losses,
        breakdown=break_down(trace_of(settings, *training)),
        peak_gib=peak,
    )


def free(settings: Settings) -> None:
    """Give back what a measure took, so that the next one finds the memory empty."""
    if settings.compiled or settings.cuda_graphs:
        torch.compiler.reset()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def repair(rank: int) -> tuple[float, int, list[Result | str]]:
    """The peak in FLOP/s, the parameters that multiply, and what each measure gave."""
    miniddp.set_seed(0)
    template = load_model(SIZE, pretrained=False)
    embedding = template.get_input_embeddings().weight.numel()
    multiplying = sum(parameter.numel() for parameter in template.parameters()) - embedding
    dist.barrier()
    known = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    dtype, size = (torch.bfloat16, 8192) if on_gpu else (torch.float32, 1024)
    measured = measured_peak_flops(device(), dtype, size)
    results: list[Result | str] = []
    settings = Settings()
    for measure in MEASURES:
        changed = replace(settings, **measure.change)
        try:
            results.append(run_measure(changed, template, rank))
        except (RuntimeError, ImportError, OSError) as error:
            if measure is MEASURES[0]:
                raise
            results.append(one_line(error))
        else:
            settings = settings if measure.aside else changed
        free(changed)
    return known or measured, multiplying, results


started = time.perf_counter()
ranks = miniddp.run_ranks(repair, WORLD_SIZE, backend=BACKEND, timeout=580)
print(f"{len(MEASURES)} measures in {time.perf_counter() - started:.0f} s")

# %% [markdown]
# ## The repair
#
# Tokens are real ones; padding is counted apart. The peak is that of bf16 products in NVIDIA's data
# sheet, or on a CPU the measured one of float32 products. It is the same for all rows.


# %% name="joined-results"
@dataclass(frozen=True)
class Outcome:
    """A measure over all ranks; `own` is what rank 0 saw."""

    name: str
    own: Result
    step_seconds: float
    pairs_per_second: float
    tokens_per_second: float
    padding: float
    mfu: float
    computed_mfu: float


peak = sum(rank[0] for rank in ranks)
multiplying = ranks[0][1]


def join(name: str, results: list[Result]) -> Outcome:
    own = results[0]
    tokens = sum(result.tokens for result in results)
    computed = sum(result.computed_tokens for result in results)
    steps = MICRO_BATCHES / own.settings.accumulation
    return Outcome(
        name=name,
        own=own,
        step_seconds=own.seconds / steps,
        pairs_per_second=sum(result.pairs for result in results) / own.seconds,
        tokens_per_second=tokens / own.seconds,
        padding=1 - tokens / computed,
        mfu=utilisation(training_flops(multiplying, tokens), own.seconds, peak),
        computed_mfu=utilisation(training_flops(multiplying, computed), own.seconds, peak),
    )


failures = {}
outcomes = []
for measure, *results in zip(MEASURES, *(rank[2] for rank in ranks), strict=True):
    reasons = [result for result in results if isinstance(result, str)]
    if reasons:
        failures[measure.name] = reasons[0]
    else:
        outcomes.append(join(measure.name, results))
first = outcomes[0]
best = max(outcomes, key=lambda outcome: outcome.tokens_per_second)
speedup = best.tokens_per_second / first.tokens_per_second
assert speedup > 1.2, "the repair pays"
for outcome in outcomes:
    assert all(0 < loss < 3 for loss in outcome.own.losses), f"{outcome.name} trains no more"
    same_batches = (outcome.own.settings.batch_size, outcome.own.settings.by_length) == (
        SMALL,
        False,
    )
    if same_batches:
        assert abs(outcome.own.losses[0] - first.own.losses[0]) < 0.1, f"{outcome.name} is wrong"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


# %% name="repair"
def speed_row(measure: Measure) -> list[str]:
    if measure.name in failures:
        return [f"{measure.name}: did not run ({failures[measure.name]})", *["–"] * 6]
    outcome = next(outcome for outcome in outcomes if outcome.name == measure.name)
    return [
        measure.name,
        f"{outcome.pairs_per_second:,.0f}",
        f"{outcome.tokens_per_second:,.0f}",
        f"{outcome.tokens_per_second / first.tokens_per_second:.2f}",
        percent(outcome.padding),
        percent(outcome.mfu),
        percent(outcome.computed_mfu),
    ]


table(
    map(speed_row, MEASURES),
    ["measure", "pairs/s", "tokens/s", "× first", "padding, %", "MFU, %", "MFU with padding, %"],
    align="lrrrrrr",
)
record(
    speedup=speedup,
    best=best.name,
    first_tokens=first.tokens_per_second,
    best_tokens=best.tokens_per_second,
    first_mfu=100 * first.mfu,
    best_mfu=100 * best.mfu,
    best_computed_mfu=100 * best.computed_mfu,
    first_padding=100 * first.padding,
    peak_tflops=peak / 1e12,
    multiplying_millions=multiplying / 1e6,
    measures=len(MEASURES),
    failed=len(failures),
)

# %% name="repair-figure"
fig, axes = plt.subplots(figsize=(6.4, 0.6 + 0.34 * len(outcomes)))
names = [outcome.name for outcome in outcomes]
bars = axes.barh(names, [outcome.tokens_per_second for outcome in outcomes], color=LINE, height=0.7)
bars[names.index(best.name)].set_color(FOREGROUND)
axes.invert_yaxis()
axes.set(xlabel="tokens per second, without padding")
axes.grid(visible=False, axis="y")
figure(fig)

# %% [markdown]
# ## Inside the step, from the traces
#
# Busy is the share of the step in which the device ran anything: kernels on a GPU, operators on a
# CPU. Communication is exposed while no other work runs.


# %% name="inside"
def busy(breakdown: Breakdown) -> float | None:
    if on_gpu:
        return breakdown.gpu_busy
    return 1 - breakdown.families["idle"].share - breakdown.exposed.share


def inside_row(outcome: Outcome) -> list[str]:
    breakdown = outcome.own.breakdown
    peak_gib = outcome.own.peak_gib
    return [
        outcome.name,
        f"{outcome.step_seconds * 1e3:.1f}",
        percent(busy(breakdown)),
        *([percent(breakdown.tensor_cores)] if on_gpu else []),
        percent(breakdown.communication.share),
        percent(breakdown.exposed.share),
        *([f"{peak_gib:.1f}"] if peak_gib is not None else []),
    ]


table(
    map(inside_row, outcomes),
    [
        "measure",
        "ms per step",
        "busy, %",
        *(["tensor cores, %"] if on_gpu else []),
        "communication, %",
        "exposed, %",
        *(["peak GiB"] if on_gpu else []),
    ],
    align="l" + "r" * (6 if on_gpu else 4),
)
for name, outcome in (("first", first), ("best", best)):
    record(**{f"{name}_communication": 100 * outcome.own.breakdown.communication.share})
    if (
        busy(outcome.own.breakdown) is not None
    ):  # a GPU whose counters are locked records no kernels
        record(**{f"{name}_busy": 100 * busy(outcome.own.breakdown)})

# %% [markdown]
# ## Before and after
#
# Where the time of one pair goes: of the slow step, and of the best one.


# %% name="before-after"
def milliseconds_per_pair(outcome: Outcome) -> dict[str, float]:
    """Steps are as long as on the clock; the trace says what share of it each family has."""
    breakdown, settings = outcome.own.breakdown, outcome.own.settings
    pairs = settings.batch_size * settings.accumulation
    shares = {name: part.share for name, part in breakdown.families.items()}
    return {name: 1e3 * outcome.step_seconds * share / pairs for name, share in shares.items()}


before, after = milliseconds_per_pair(first), milliseconds_per_pair(best)
parts_before, parts_after = first.own.breakdown.families, best.own.breakdown.families
table(
    [
        [
            name,
            f"{before[name]:.3f}",
            percent(parts_before[name].share),
            f"{after[name]:.3f}",
            percent(parts_after[name].share),
        ]
        for name in before
        if max(parts_before[name].share, parts_after[name].share) >= 0.001
    ],
    ["work", "before: ms per pair", "share, %", "after: ms per pair", "share, %"],
    align="lrrrr",
)

# %% [markdown]
# ## Accumulation and the share of communication
#
# Share of communication in the time of all work, from the traces. Arithmetic says what to expect:
# if one exchange takes the share s next to one micro-batch, it takes s / (s + k (1 - s)) next to k.


# %% name="accumulation"
def communication_share(outcome: Outcome) -> float:
    families = outcome.own.breakdown.families
    total = sum(part.seconds for name, part in families.items() if name != "idle")
    return families["communication"].seconds / total


asides = {measure.name for measure in MEASURES if measure.aside}
sequence = [outcome for outcome in outcomes if outcome.name not in asides]
single = [outcome for outcome in sequence if outcome.own.settings.accumulation == 1][-1]
accumulated = [outcome for outcome in sequence if outcome.own.settings.accumulation > 1]
shares = {o.own.settings.accumulation: communication_share(o) for o in (single, *accumulated)}
once = shares[1]
table(
    [
        [count, percent(share), percent(once / (once + count * (1 - once)))]
        for count, share in shares.items()
    ],
    ["micro-batches per step", "communication, %", "by arithmetic, %"],
    align="rrr",
)
