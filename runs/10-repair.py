# %% [markdown]
# # A slow step, repaired measure by measure
#
# A training step as it is often written first: every pair padded to the same length, one message
# per parameter after backward, full precision, the loss read in every step. Then one measure after
# the other, each tried against the step as repaired so far, and kept only if it pays. Last come the
# two that change the training too, since an update takes more pairs with them.
#
# With a GPU: SmolLM2-360M's architecture with random weights, one rank over NCCL. Without: a small
# model of the same architecture, two ranks over Gloo, and the measures that a CPU can take.

# %% name="setup"
import copy
import gc
import os
import random
import statistics
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
from book import FOREGROUND, SURFACE, WAITING, data_dir, figure, provenance, record, table
from finetune.data import encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from instruments import measurements
from instruments.breakdown import Breakdown, break_down
from instruments.clock import clock
from instruments.flops import measured_peak_flops, peak_flops, training_flops, utilisation
from instruments.profiling import Profiler, Schedule, region
from instruments.trace import Trace, read_trace
from miniddp.process import device

on_gpu = device().type == "cuda"
SIZE = "360m" if on_gpu else "tiny"
WORLD_SIZE, BACKEND = (1, "nccl") if on_gpu else (2, "gloo")
SMALL, LARGE = (8, 128) if on_gpu else (8, 16)
MICRO_BATCHES = 16 if on_gpu else 4  # in a pass
ROUNDS = 9
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
    rounds=ROUNDS,
    micro_batches=MICRO_BATCHES,
    median_length=median,
)

# %% [markdown]
# ## The measures
#
# Settings say how a step is taken. A measure changes one of them, and may aim at a part of the step
# that a profile shows: it can save that part at most.


# %% name="settings"
@dataclass(frozen=True)
class Settings:
    """How a training step is taken. The defaults are the slow step."""

    batch_size: int = SMALL
    by_length: bool = False
    buckets: bool = False
    accumulation: int = 1
    tf32: bool = False
    bf16: bool = False
    attention: str = "eager"
    fused_optimizer: bool = False
    pinned: bool = False
    read_every_loss: bool = True
    compiled: bool = False


@dataclass(frozen=True)
class Measure:
    """One change of the settings, and what it saves."""

    name: str
    saves: str
    change: dict[str, object]
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def changes_updates(self) -> bool:
        return not self.change.keys().isdisjoint({"batch_size", "accumulation"})


GPU_ONLY = ("cuda",)
ALL_MEASURES = [
    Measure("batches of like lengths", "padding", {"by_length": True}),
    Measure("buckets during backward", "messages, waiting", {"buckets": True}),
    Measure("TF32 products", "bits", {"tf32": True}, GPU_ONLY),
    Measure("bf16 autocast", "bits", {"bf16": True}),
    Measure("SDPA attention", "kernels", {"attention": "sdpa"}),
    Measure("fused AdamW", "kernels", {"fused_optimizer": True}),
    Measure("pinned memory", "waiting for copies", {"pinned": True}, GPU_ONLY),
    Measure(
        "no .item() in the step", "waiting for the device", {"read_every_loss": False}, GPU_ONLY
    ),
    Measure("torch.compile", "kernels", {"compiled": True}),
    Measure(f"{LARGE} pairs in a batch", "messages, updates", {"batch_size": LARGE}),
    Measure("accumulation of 4", "messages, updates", {"accumulation": 4}),
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
def prepare(settings: Settings, template: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The wrapped model and its optimizer."""
    module = copy.deepcopy(template).to(device())
    module.config._attn_implementation = settings.attention
    module.config.use_cache = False  # what generation of text keeps, and training does not need
    if settings.compiled:
        for layer in module.model.layers:
            layer.compile()
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
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
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
# The step as repaired so far and the step with one more measure take turns, pass by pass, so that
# whatever else the machine does slows both. Each round gives one ratio of their speeds in real
# tokens per second, padding left out. A measure pays if at least three quarters of the rounds were
# faster with it. The clock waits for the device, and a pass takes as long as on the slowest rank.


# %% name="measure"
class Training:
    """A model, its optimizer and the batches of this rank, trained in one way."""

    def __init__(self, settings: Settings, template: nn.Module, rank: int) -> None:
        self.settings = settings
        self.model, self.optimizer = prepare(settings, template)
        self.chunks = micro_batches(settings, rank)
        tokens = sum(len(row["input_ids"]) for rows in self.chunks for row in rows)
        computed = sum(pad(rows, settings)["input_ids"].numel() for rows in self.chunks)
        self.tokens, self.computed = total([tokens, computed])
        self.losses = self.train()  # warms up

    def train(self) -> list[float]:
        return train_pass(self.model, self.optimizer, self.chunks, self.settings)

    def pass_seconds(self) -> float:
        """Seconds of a pass on the slowest rank."""
        dist.barrier()
        start = clock()
        self.train()
        seconds = torch.tensor(clock() - start, device=device())
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def trace_of(training: Training) -> Trace:
    """Eight steps, after one that warms up the profiler."""
    schedule = Schedule(skip_first=0, wait=0, warmup=1, active=8)
    steps = 9 * training.settings.accumulation
    chunks = (steps * training.chunks)[:steps]
    with (
        tempfile.TemporaryDirectory() as folder,
        Profiler(folder, schedule, all_ranks=True) as profiler,
    ):
        train_pass(training.model, training.optimizer, chunks, training.settings, profiler)
        trace = read_trace(profiler.traces[0])
    events = [event for event in trace.events if not event.name.startswith("nccl:")]  # no kernels
    return Trace(events, trace.rank, trace.world_size)


def total(counts: list[int]) -> list[int]:
    """The sums over all ranks."""
    sums = torch.tensor(counts, device=device())
    dist.all_reduce(sums)
    return sums.tolist()


def compare(old: Training, new: Training) -> list[float]:
    """How many times faster the new way is in each round. The two take turns to begin."""
    ratios = []
    for number in range(ROUNDS):
        order = (new, old) if number % 2 else (old, new)
        speed = {training: training.tokens / training.pass_seconds() for training in order}
        ratios.append(speed[new] / speed[old])
    return ratios


@dataclass(frozen=True)
class State:
    """A way to train, measured: seconds of a pass, its parts from this rank's trace, and the share
    of exposed messages on the rank where it is smallest, which no rank waits for."""

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


def look_at(training: Training) -> State:
    breakdown = break_down(trace_of(training))
    exposed = torch.tensor(breakdown.exposed.share, device=device())
    dist.all_reduce(exposed, dist.ReduceOp.MIN)
    return State(
        settings=training.settings,
        seconds=statistics.median(training.pass_seconds() for _ in range(ROUNDS)),
        tokens=training.tokens,
        computed=training.computed,
        losses=training.losses,
        breakdown=breakdown,
        exposed=exposed.item(),
    )


def avoidable(change: dict[str, object], step: State) -> float | None:
    """The share of the step that a change aims at. Padding is computed, but neither sent nor part
    of the update."""
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


@dataclass(frozen=True)
class Trial:
    """What a measure brought to a step, or why it did not run."""

    measure: Measure
    step: State
    ratios: list[float] = field(default_factory=list)
    loss_difference: float = 0.0  # in the first pass
    tried: State | None = None
    failure: str = ""

    @property
    def avoidable(self) -> float | None:
        return avoidable(self.measure.change, self.step)

    @property
    def kept(self) -> bool:
        return bool(self.ratios) and pays(self.ratios)


def pays(ratios: list[float]) -> bool:
    return statistics.quantiles(ratios, n=4)[0] > 1


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def peak(settings: Settings) -> float:
    """FLOP/s of this rank's device at its best in a step's precision, all ranks at once."""
    known = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    dist.barrier()
    return known or measured_peak_flops(device(), dtype, size=1024, repeats=20)


@dataclass(frozen=True)
class Repair:
    """What one rank saw. `faster` has the ratios of the repaired step's speed and the slow one's,
    `faster_alike` those before the measures that change the updates, `peaks` the FLOP/s of both."""

    before: State
    trials: list[Trial]
    after: State
    faster_alike: list[float]
    faster: list[float]
    peaks: tuple[float, float]


def repair(rank: int) -> Repair:
    miniddp.set_seed(0)
    template = load_model(SIZE, pretrained=False)
    slow = kept = Training(Settings(), template, rank)
    before = state = look_at(slow)
    trials, faster_alike = [], []
    for measure in MEASURES:
        if measure.changes_updates and not faster_alike:
            faster_alike = compare(slow, kept)
        try:
            tried = Training(replace(kept.settings, **measure.change), template, rank)
            ratios, found = compare(kept, tried), look_at(tried)
        except (RuntimeError, ImportError, OSError) as error:
            trials.append(Trial(measure, state, failure=one_line(error)))
            continue
        pairs = zip(kept.losses, tried.losses, strict=True)
        difference = max(abs(now - before) for before, now in pairs)
        trials.append(Trial(measure, state, ratios, difference, found))
        if trials[-1].kept:
            kept, state = tried, found
        del tried
        gc.collect()
    peaks = peak(slow.settings), peak(kept.settings)
    return Repair(before, trials, state, faster_alike, compare(slow, kept), peaks)


started = time.perf_counter()
ranks = miniddp.run_ranks(repair, WORLD_SIZE, backend=BACKEND, timeout=1700)
before, after, trials = ranks[0].before, ranks[0].after, ranks[0].trials
print(f"{len(MEASURES)} measures in {time.perf_counter() - started:.0f} s")

# %% [markdown]
# ## The slow step, from its trace
#
# Work is what runs on the device: kernels on a GPU, operators on a CPU. Exposed is the time with a
# message and no other work.


# %% name="slow-step"
def percent(share: float) -> str:
    return f"{100 * share:.0f}"


def parts_of(state: State) -> dict[str, float]:
    """Shares of a step's time. What is hidden is in the work that hides it."""
    work = {
        name: part.share
        for name, part in state.breakdown.families.items()
        if name not in ("communication", "idle")
    }
    return {
        "message, and no other work": state.breakdown.exposed.share,
        **dict(sorted(work.items(), key=lambda item: -item[1])),
        "nothing: Python, waiting": state.share("idle"),
    }


on_each_rank = [parts_of(each.before) for each in ranks]
table(
    [
        [name, *(percent(parts[name]) for parts in on_each_rank)]
        for name, share in on_each_rank[0].items()
        if share >= 0.005
    ],
    ["share of the step, %", *(f"rank {rank}" for rank in range(WORLD_SIZE))],
)
step_ms = 1e3 * before.seconds / MICRO_BATCHES
record(
    step_ms=step_ms,
    first_padding=100 * before.padding,
    first_exposed=100 * before.breakdown.exposed.share,
)

# %% [markdown]
# ## The repair
#
# What a measure aims at is a share of the step as repaired so far, and bounds what it can bring.
# The range has the middle half of the rounds.


# %% name="repair"
def middle_half(ratios: list[float]) -> str:
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.2f}–{high:.2f}"


def row_of(trial: Trial) -> list[str]:
    share = trial.avoidable
    bound = "–" if share is None else f"{1 / (1 - share):.2f}"
    if trial.failure:
        return [trial.measure.name, f"did not run ({trial.failure})", bound, "–", ""]
    brought = f"{statistics.median(trial.ratios):.2f} ({middle_half(trial.ratios)})"
    return [trial.measure.name, trial.measure.saves, bound, brought, "yes" if trial.kept else "no"]


table(
    map(row_of, trials),
    ["measure", "saves", "at most ×", "brought ×", "kept"],
    align="llrrl",
)
speedup, alike = (statistics.median(each) for each in (ranks[0].faster, ranks[0].faster_alike))
assert speedup > 1.3, "the repair pays"
for state in (before, after):
    assert all(0 < loss < 3 for loss in state.losses), "it trains no more"
trial_of = {trial.measure.name: trial for trial in trials}
fused, sdpa, buckets, bf16 = (
    trial_of[name]
    for name in ("fused AdamW", "SDPA attention", "buckets during backward", "bf16 autocast")
)
record(
    fused_share=100 * fused.avoidable,
    fused_at_most=1 / (1 - fused.avoidable),
    **(
        {"sdpa": statistics.median(sdpa.ratios), "sdpa_aim": 100 * sdpa.step.share("attention")}
        if sdpa.tried
        else {}
    ),
    bf16_slower=1 / statistics.median(bf16.ratios),
    exposed_before_buckets=100 * buckets.step.exposed,
    speedup=speedup,
    speedup_alike=alike,
    measures=len(trials),
    kept=sum(trial.kept for trial in trials),
    best_padding=100 * after.padding,
)

# %% [markdown]
# ## Fast and wrong is not repaired
#
# With and without a measure, the first pass starts from the same weights. A measure that leaves the
# batches as they are must leave their losses too, up to rounding.

# %% name="same-losses"
OTHER_STEPS = {"by_length", "batch_size", "accumulation"}
differences = {
    trial.measure.name: trial.loss_difference
    for trial in trials
    if not trial.failure and not OTHER_STEPS & set(trial.measure.change)
}
for name, difference in differences.items():
    print(f"{difference:.4f}  {name}")
largest = max(differences.values())
assert largest < 0.1, "fast, and wrong"
record(largest_loss_difference=largest)

# %% [markdown]
# ## The same measures elsewhere
#
# How many times faster others became, from their published tables, where they took the measures in
# another order.


# %% name="elsewhere"
def factors(rows: list[measurements.Row], column: str, up: bool) -> dict[str, float]:
    """Change → how many times faster it made the step of the row above."""
    values = [row[column] for row in rows]
    pairs = zip(values, values[1:], rows[1:], strict=False)
    return {row["change"]: now / before if up else before / now for before, now, row in pairs}


a100 = factors(measurements.read("gpt_training_step_repaired_a100"), "tokens_per_s", up=True)
gpt2 = factors(measurements.read("gpt2_124m_step_time"), "ms_per_step", up=False)
sync = {
    row["record"]: row["step_avg_ms"] for row in measurements.read("gradient_sync_variants_8xh100")
}
t4 = {(row["nodes"], row["method"]): row["s_per_batch"] for row in measurements.read("no_sync_t4")}
llama = {
    row["techniques"]: row["tokens_per_s_per_gpu"]
    for row in measurements.read("fsdp_scaling_llama3_8b")
    if row["gpus"] == 8
}
compile_8b = llama["FSDP + torch.compile"] / llama["FSDP"]
buckets_h100 = sync["21 on newer torch"] / sync["23"]
one_node, two_nodes = (
    t4[nodes, "baseline"] / t4[nodes, "no_sync around forward and backward"] for nodes in (1, 2)
)
elsewhere = [
    ("TF32 products", "tensor cores (TF32 matmul)", "TF32 matmul precision", ""),
    ("bf16", "bfloat16", "bfloat16 autocast", ""),
    (
        "fused attention (SDPA)",
        "FlashAttention through scaled_dot_product_attention",
        "FlashAttention",
        "",
    ),
    ("fused AdamW", "fused AdamW", "fused AdamW", ""),
    ("pinned memory", "pinned memory in the loader", "", ""),
    ("torch.compile", "torch.compile", "torch.compile", f"{compile_8b:.2f}, Llama 8B on 8 H100"),
    ("a larger batch", "larger batch", "", ""),
    ("buckets during backward", "", "", f"{buckets_h100:.2f}, 8 H100 in a node"),
    ("accumulation of 4", "", "", f"{one_node:.2f}, 2 T4 in a node; {two_nodes:.2f}, in two nodes"),
]


def times(found: dict[str, float], name: str) -> str:
    return f"{found[name]:.2f}" if name else "–"


table(
    [
        [name, times(a100, first), times(gpt2, second), other or "–"]
        for name, first, second, other in elsewhere
    ],
    ["measure", "GPT, A100", "GPT‑2", "others"],
    align="lrrl",
)
record(
    compile_a100=a100["torch.compile"],
    compile_gpt2=gpt2["torch.compile"],
    compile_8b=compile_8b,
    buckets_h100=buckets_h100,
    no_sync_one_node=one_node,
    no_sync_two_nodes=two_nodes,
)

# %% [markdown]
# ## Before and after
#
# Where the time of a step goes, of the slow one and of the repaired one, and the part of the
# hardware's peak that the model makes use of. The peak is that of bf16 products in NVIDIA's data
# sheet, or on a CPU the measured one, in the step's precision, on all ranks at once.


# %% name="before-after"
peaks = [sum(each) for each in zip(*(found.peaks for found in ranks), strict=True)]
template = load_model(SIZE, pretrained=False)
embedding = template.get_input_embeddings().weight.numel()
multiplying = sum(parameter.numel() for parameter in template.parameters()) - embedding


flops = training_flops(multiplying, before.tokens)
mfu, best_mfu = (
    100 * utilisation(flops, seconds, fastest)  # both of the same real tokens
    for seconds, fastest in zip((before.seconds, before.seconds / speedup), peaks, strict=True)
)
shares = [parts_of(state) for state in (before, after)]
milliseconds = 1e6 * before.seconds / before.tokens  # of 1,000 real tokens
lengths_of_bars = [milliseconds, milliseconds / speedup]
waits, *work, idle = shares[0]
shown = ["matmul", "attention", "elementwise"]
rest = [name for name in work if name not in shown]
parts_of_bar = {
    waits: [waits],
    **{name: [name] for name in shown},
    "other work": rest,
    idle: [idle],
}

fig, axes = plt.subplots(figsize=(5.2, 2.6))
starts = [0.0, 0.0]
for name, parts in parts_of_bar.items():
    long = [
        length * sum(each[part] for part in parts)
        for length, each in zip(lengths_of_bars, shares, strict=True)
    ]
    look = {"color": WAITING} if name == waits else {}
    if name == idle:
        look = {"color": SURFACE, "edgecolor": FOREGROUND}
    axes.barh(["slow", "repaired"], long, 0.6, starts, alpha=0.7, label=name, **look)
    starts = [start + part for start, part in zip(starts, long, strict=True)]
axes.invert_yaxis()
axes.set(xlabel="ms for 1,000 real tokens")
axes.grid(visible=False, axis="y")
fig.legend(loc="outside lower center", ncols=2)
figure(fig)

# %% name="before-after-values"
record(
    first_mfu=mfu,
    best_mfu=best_mfu,
    best_matmul=100 * shares[1]["matmul"],
    products_of_peak=best_mfu / shares[1]["matmul"],
    best_exposed=100 * shares[1][waits],
    peak_tflops=peaks[0] / 1e12,
    multiplying_millions=multiplying / 1e6,
)
