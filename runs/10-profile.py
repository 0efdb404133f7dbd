# %% [markdown]
# # Profile it
#
# Where does the time of a training step go? This run records steps of real training with
# `torch.profiler`: which steps the schedule takes, what each parameter of `profile` adds and costs,
# what regions say, and what one trace tells about the other ranks.

# %% name="setup"
import inspect
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 prints a line per recording otherwise

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import miniddp
import own_step
from book import RANK_COLORS, data_dir, figure, provenance, record, table
from finetune.data import collate, encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from finetune.training_step import WRAPPERS
from finetune.training_step import train_step as take_step
from instruments.breakdown import (
    GPU_CATEGORIES,
    Breakdown,
    break_down,
    operator_families,
    region_spans,
)
from instruments.clock import clock
from instruments.flops import training_flops
from instruments.intervals import union
from instruments.profiling import Profiler, Schedule, region
from instruments.trace import Event, Trace, read_trace
from miniddp.process import device

warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # see acc_events below
WORLD_SIZE = 2
on_gpu = device().type == "cuda"
SIZE, PAIRS_PER_RANK = ("25m", 32) if on_gpu else ("tiny", 16)
provenance(device=device(), world_size=[1, WORLD_SIZE], backend="gloo")
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], SIZE, pretrained=False)
encoded = encode(pairs.select(range(min(1024, len(pairs)))), tokenizer, max_length=128)

Batch = dict[str, Tensor]


def load_batch(step: int, rank: int) -> Batch:
    """The pairs of one rank in one step."""
    first = (step * WORLD_SIZE + rank) * PAIRS_PER_RANK
    return collate([encoded[(first + i) % len(encoded)] for i in range(PAIRS_PER_RANK)], tokenizer)


def build() -> nn.Module:
    miniddp.set_seed(0)
    return load_model(SIZE, pretrained=False).to(device())


print(f"model {SIZE}, {PAIRS_PER_RANK} pairs per rank")

# %% [markdown]
# ## A training loop with a profiler
#
# Two ranks train 13 steps; the schedule of the book records the last five. Each rank writes a
# trace, and `instruments.breakdown` makes a table of it. A rank can be told to be slow: it then
# sleeps while it loads its batch.

# %% name="profiled-training"
STEPS = 13


def profiled_training(
    rank: int,
    folder: Path,
    wrapper: str = "miniddp",
    load_seconds: Sequence[float] = (0, 0),
) -> Path:
    """Train; returns this rank's trace of steps 8 to 12."""
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    model = WRAPPERS[wrapper](module)
    with Profiler(folder, all_ranks=True) as profiler:
        for number in range(STEPS):
            with region("load_batch"):
                batch = load_batch(number, rank)
                time.sleep(load_seconds[rank])
            take_step(model, optimizer, [batch])
            profiler.step()
    return profiler.traces[0]


folder = Path(tempfile.mkdtemp(prefix="traces-"))


def train(name: str, **arguments: object) -> list[Trace]:
    """The traces of both ranks."""
    traces = miniddp.run_ranks(
        profiled_training, WORLD_SIZE, folder / name, *arguments.values(), timeout=300
    )
    return [read_trace(path) for path in traces]


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


even = train("even", wrapper="miniddp", load_seconds=(0, 0))
step_of = [break_down(trace) for trace in even]
for breakdown in step_of:
    assert breakdown.steps == Schedule().active
    assert breakdown.world_size == WORLD_SIZE

# %% name="breakdown"
zero = step_of[0]
table(
    [
        [kind, name, f"{milliseconds:.1f}", percent(share)]
        for kind, name, milliseconds, share in zero.rows()
        if milliseconds >= 0.05
    ],
    ["", "name", "ms per step", "share, %"],
    align="llrr",
)
record(
    step_milliseconds=zero.step_seconds * 1e3,
    communication_share=100 * zero.communication.share,
    exposed_share=100 * zero.exposed.share,
)

# %% [markdown]
# ## Which steps the schedule records
#
# Each trace is asked which steps it holds.


# %% name="phases"
phases = [Schedule().phase(step) for step in range(20)]
for phase in dict.fromkeys(phases):
    steps = [step for step in range(20) if phases[step] == phase]
    print(
        f"{phase:7} steps {steps[0]} to {steps[-1]}"
        if len(steps) > 1
        else f"{phase:7} step {steps[0]}"
    )


# %% name="schedule"
def written(recording: profile, name: str = "steps") -> Path:
    """The file of a trace; a trace can be written once."""
    path = folder / f"{name}.json"
    recording.export_chrome_trace(str(path))
    return path


def steps_with_work(trace: Trace) -> list[int]:
    sums = [event for event in trace.events if event.name == "aten::sum"]
    return [
        int(step.name.removeprefix("ProfilerStep#"))
        for step in trace.events
        if step.name.startswith("ProfilerStep#")
        and any(step.start <= event.start < step.end for event in sums)
    ]


def traces_of(repeat: int, steps: int) -> list[list[int]]:
    """The steps in each trace that torch makes of a training of so many steps."""
    traces = []

    def keep(recording: profile) -> None:
        traces.append(steps_with_work(read_trace(written(recording))))

    schedule = torch.profiler.schedule(skip_first=5, wait=1, warmup=2, active=5, repeat=repeat)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=keep
    ) as profiler:
        for _ in range(steps):
            torch.ones(8).sum()
            profiler.step()
    return traces


def in_words(traces: list[list[int]]) -> str:
    return ", ".join(f"{steps[0]}–{steps[-1]}" for steps in traces) or "nothing"


assert traces_of(repeat=1, steps=20) == [[8, 9, 10, 11, 12]], "one cycle, then nothing"
assert traces_of(repeat=1, steps=30) == [[8, 9, 10, 11, 12]]
assert traces_of(repeat=2, steps=30) == [[8, 9, 10, 11, 12], [16, 17, 18, 19, 20]]
assert traces_of(repeat=2, steps=20)[1] == [16, 17, 18, 19], "training ends before step 20"
assert len(traces_of(repeat=0, steps=30)) > 2
table(
    [
        [f"repeat={repeat}", *(in_words(traces_of(repeat, steps)) for steps in (20, 30))]
        for repeat in (1, 2, 0)
    ],
    ["", "20 steps", "30 steps"],
    align="lll",
)

# %% [markdown]
# Two ways to an empty folder: a training that ends before the first recording, and a loop without
# `step()`.


# %% name="nothing-recorded"
def too_short(rank: int) -> int:
    with Profiler(folder / "too-short") as profiler:
        for _ in range(7):
            profiler.step()
    return len(profiler.traces)


def without_step() -> int:
    traces: list[profile] = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=traces.append
    ):
        for _ in range(10):
            torch.ones(8).sum()
    return len(traces)


short = miniddp.run_ranks(too_short, 1)
assert short == [0]
assert without_step() == 0
print(textwrap.fill("seven steps: " + short.outputs[0], 64))
print("no step():", without_step(), "traces, and no warning")

# %% [markdown]
# ## Every parameter of `profile`

# %% name="signature"
for name, parameter in inspect.signature(profile).parameters.items():
    print(f"{name} = {parameter.default}")

# %% [markdown]
# One process, the same training step, one parameter at a time. The settings take turns. Processor
# time is that of all threads of the process, and does not count what other programs use.

# %% name="cost"
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batch = {name: tensor.to(device()) for name, tensor in load_batch(0, 0).items()}
BOTH = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
SETTINGS = {
    "only the CPU's events": {"activities": [ProfilerActivity.CPU]},
    **({"the GPU's too": {"activities": BOTH}} if on_gpu else {}),
    "record_shapes": {"activities": BOTH, "record_shapes": True},
    "profile_memory": {"activities": BOTH, "profile_memory": True},
    "with_stack": {"activities": BOTH, "with_stack": True},
    "with_flops": {"activities": BOTH, "with_flops": True},
    "with_modules": {"activities": BOTH, "with_modules": True},
    "acc_events": {"activities": BOTH, "acc_events": True},
}
ROUNDS, ACTIVE = 5, 2


def train_step() -> None:
    with region("forward"):
        loss = model(**batch).loss
    with region("backward"):
        loss.backward()
    with region("opt_step"):
        optimizer.step()
        optimizer.zero_grad()


def processor_seconds(profiler: profile | None) -> float:
    """Processor time of a recorded step."""
    train_step()
    if profiler is not None:
        profiler.step()
    start = time.process_time()
    for _ in range(ACTIVE):
        train_step()
        if profiler is not None:
            profiler.step()
    return (time.process_time() - start) / ACTIVE


def profiled(parameters: dict[str, object]) -> tuple[float, profile]:
    # One step more than are trained: the work at the end of a cycle is not measured.
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=ACTIVE + 1, repeat=1)
    with profile(schedule=schedule, **parameters) as profiler:
        seconds = processor_seconds(profiler)
    return seconds, profiler


torch.set_num_threads(1)
processor_seconds(None)
seconds = {name: [] for name in SETTINGS}
without = []
recordings = {}
for _ in range(ROUNDS):
    without.append(processor_seconds(None))
    for name, parameters in SETTINGS.items():
        taken, recordings[name] = profiled(parameters)
        seconds[name].append(taken)
files = {name: written(recording, name) for name, recording in recordings.items()}
bytes_of = {name: path.stat().st_size for name, path in files.items()}
plain = bytes_of["only the CPU's events"]
assert bytes_of["record_shapes"] > 1.1 * plain
assert bytes_of["profile_memory"] > 1.1 * plain
assert bytes_of["with_stack"] > 1.2 * plain
table(
    [
        ["no profiler", "1.00", "–"],
        *(
            [
                name,
                f"{statistics.median(seconds[name]) / statistics.median(without):.2f}",
                f"{bytes_of[name] / ACTIVE / 1e6:.2f}",
            ]
            for name in SETTINGS
        ),
    ],
    ["", "processor time of a step", "MB of trace per step"],
    align="lrr",
)

# %% [markdown]
# ### What each adds


# %% name="categories"
def categories(name: str) -> Counter[str]:
    return Counter(event.category for event in read_trace(files[name]).events)


DEFAULT = "the GPU's too" if on_gpu else "only the CPU's events"
assert "python_function" not in categories(DEFAULT)
assert categories("with_stack")["python_function"] > 0
table(
    [[category, count] for category, count in categories(DEFAULT).most_common()],
    ["category", "events"],
    align="lr",
)

# %% name="shapes"
by_shape = recordings["record_shapes"].key_averages(group_by_input_shape=True)
products = [event for event in by_shape if event.key == "aten::mm"]
assert all(not event.input_shapes for event in recordings[DEFAULT].key_averages())
assert len(products) > 1
for event in sorted(products, key=lambda event: -event.count)[:4]:
    print(f"{event.count:4} x aten::mm of {event.input_shapes[0]} and {event.input_shapes[1]}")


# %% name="memory"
def allocated(event: object) -> int:
    """Bytes that an operator itself allocated on this device, less what it freed."""
    return event.self_device_memory_usage if on_gpu else event.self_cpu_memory_usage


by_memory = sorted(recordings["profile_memory"].key_averages(), key=allocated, reverse=True)
assert allocated(by_memory[0]) > 0
assert all(allocated(event) == 0 for event in recordings[DEFAULT].key_averages())
for event in by_memory[:4]:
    print(f"{allocated(event) / 1e6:8.1f} MB in {event.count:4} calls of {event.key}")

# %% name="stack"
trace = read_trace(files["with_stack"])
product = next(event for event in trace.events if event.name == "aten::mm")
callers = [
    event.name.rpartition("site-packages/")[2]
    for event in trace.events
    if event.category == "python_function"
    and event.start <= product.start
    and product.end <= event.end
]
modules = [name for name in callers if name.startswith("nn.Module")]
assert modules
print("the first aten::mm is called by", callers[-1])
print("\n".join(modules))

# %% name="flops"
counted = sum(event.flops for event in recordings["with_flops"].key_averages())
products = sum(
    event.flops for event in recordings["with_flops"].key_averages() if event.key == "aten::mm"
)
tokens = batch["input_ids"].numel()
parameters = sum(parameter.numel() for parameter in model.parameters())
embedding = model.get_input_embeddings().weight.numel()
formula = training_flops(parameters - embedding, tokens)
ratio = products / ACTIVE / formula
assert 0.95 < ratio < 1.05
table(
    [
        ["with_flops, matrix products", f"{products / ACTIVE / 1e9:.3f}"],
        ["with_flops, everything it counts", f"{counted / ACTIVE / 1e9:.3f}"],
        ["6 Ψ m, Ψ without the embedding", f"{formula / 1e9:.3f}"],
        ["6 Ψ m, Ψ with the embedding", f"{training_flops(parameters, tokens) / 1e9:.3f}"],
    ],
    ["", "GFLOP per step"],
)
record(flops_ratio=ratio, flops_difference=abs(1 - ratio))

# %% name="modules"
hierarchy = [
    event for event in recordings["with_modules"].events() if getattr(event, "module_hierarchy", "")
]
assert not hierarchy
assert categories("with_modules").keys() == categories(DEFAULT).keys()
print("module hierarchies in the recording:", len(hierarchy))


# %% name="cycles"
def steps_kept(acc_events: bool) -> int:
    """How many steps `events()` holds after a training with two cycles of two."""
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule, acc_events=acc_events
    ) as profiler:
        for _ in range(8):
            torch.ones(8).sum()
            profiler.step()
    return sum(event.name.startswith("ProfilerStep") for event in profiler.events())


last_cycle, all_cycles = steps_kept(acc_events=False), steps_kept(acc_events=True)
assert (last_cycle, all_cycles) == (2, 4)
print("acc_events=False:", last_cycle, "steps")
print("acc_events=True: ", all_cycles, "steps")

# %% [markdown]
# ## Regions
#
# The same training with two wrappers. `SimpleDDP` sends after backward, `DistributedDataParallel`
# during it.

# %% name="regions"
simple_traces = train("simple", wrapper="simple", load_seconds=(0, 0))
simple = [break_down(trace) for trace in simple_traces]
NAMES = ("load_batch", "data_movement", "forward", "backward", "sync_grads", "opt_step")
assert simple[0].regions["sync_grads"].seconds > 5 * zero.regions["sync_grads"].seconds
assert zero.communication.seconds > 0
table(
    [[name, *(percent(step.regions[name].share) for step in (simple[0], zero))] for name in NAMES],
    ["share of the step, %", "SimpleDDP", "DDP"],
    align="lrr",
)

# %% [markdown]
# ## A trace as a picture
#
# One step of rank 0 under each wrapper, drawn from the traces: regions, work, messages.

# %% name="timeline"
LABELLED = {"load_batch", "forward", "backward", "sync_grads"}
NARROWEST = 0.1  # of a step: no label fits into less


def lanes(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """What a rank did, as intervals in seconds: work on the device, messages."""
    families = operator_families(trace)
    messages = families.pop("communication")
    kernels = [event.interval for event in trace.events if event.category in GPU_CATEGORIES]
    operators = [interval for spans in families.values() for interval in spans]
    return {"work": union(kernels or operators), "messages": union(messages)}


def without_gaps(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The intervals, with gaps filled that nobody would see in the figure."""
    return [(start, end - gap) for start, end in union((s, e + gap) for s, e in spans)]


def recorded_steps(trace: Trace) -> dict[str, Event]:
    marks = (event for event in trace.events if event.category == "user_annotation")
    return {event.name: event for event in marks if event.name.startswith("ProfilerStep#")}


def usual_step(trace: Trace) -> Event:
    """The recorded step whose messages take longer than in half of the others."""
    messages = lanes(trace)["messages"]

    def seconds_of_messages(step: Event) -> float:
        return sum(end - start for start, end in messages if step.start <= start < step.end)

    steps = sorted(recorded_steps(trace).values(), key=seconds_of_messages)
    return steps[len(steps) // 2]


def draw_step(traces: dict[str, Trace], steps: dict[str, Event]) -> None:
    """Three rows for each trace: regions, work, messages; the colour is that of its rank."""
    fig, axes = plt.subplots(figsize=(6.4, 3.4))
    longest = max(step.end - step.start for step in steps.values())
    places, names = [], []
    for place, (name, trace) in enumerate(traces.items()):
        step, regions, rows = steps[name], region_spans(trace), lanes(trace)
        spans = {
            "regions": [(span, label) for label in NAMES for span in regions.get(label, [])],
            **{
                row: [(span, "") for span in without_gaps(rows[row], longest / 300)]
                for row in ("work", "messages")
            },
        }
        for lane, (row, bars) in enumerate(spans.items()):
            height = 4 * place + lane
            places.append(height)
            names.append(f"{name}: {row}")
            for (start, end), label in bars:
                if not step.start <= start < step.end:
                    continue
                left, width = 1e3 * (start - step.start), 1e3 * (end - start)
                axes.broken_barh(
                    [(left, width)],
                    (height - 0.38, 0.76),
                    facecolor=RANK_COLORS[trace.rank],
                    alpha=0.3 if row == "regions" else 0.75,
                    edgecolor=RANK_COLORS[trace.rank] if row == "regions" else "none",
                )
                if label in LABELLED and end - start > NARROWEST * longest:
                    axes.text(left + width / 2, height, label, ha="center", va="center", fontsize=9)
    axes.set(yticks=places, yticklabels=names, xlabel="ms since the step began")
    axes.set_xlim(0, 1.02e3 * longest)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    figure(fig)


drawn = {"SimpleDDP": simple_traces[0], "DDP": even[0]}
draw_step(drawn, {name: usual_step(trace) for name, trace in drawn.items()})

# %% [markdown]
# ## What rank 0 sees of the others
#
# The same training with one thing wrong in each.

# %% name="symptoms"
SLEEP = 0.3
straggler_traces = train("straggler", wrapper="miniddp", load_seconds=(0, SLEEP))
cases = {
    "nothing": step_of,
    "per-parameter messages": simple,
    "slow loading on both ranks": [
        break_down(trace)
        for trace in train("loader", wrapper="miniddp", load_seconds=(SLEEP, SLEEP))
    ],
    "slow loading on rank 1 only": [break_down(trace) for trace in straggler_traces],
}
loader, straggler = cases["slow loading on both ranks"], cases["slow loading on rank 1 only"]
assert loader[0].regions["load_batch"].seconds > SLEEP
assert straggler[0].regions["load_batch"].seconds < SLEEP, "rank 0 itself is quick"
assert straggler[0].communication.seconds > straggler[1].communication.seconds + SLEEP / 3


def symptoms(name: str, step: Breakdown) -> list[str]:
    loading = step.regions["load_batch"].seconds / step.step_seconds
    shares = (loading, step.families["idle"].share, step.communication.share)
    return [name, f"{step.step_seconds * 1e3:.0f}", *map(percent, shares)]


COLUMNS = ["what is wrong", "ms per step", "loading, %", "idle, %", "messages, %"]
table([symptoms(name, steps[0]) for name, steps in cases.items()], COLUMNS, align="lrrrr")

# %% name="straggler"
table(
    [
        [f"rank {rank}", *symptoms("", step)[2:], percent(step.exposed.share)]
        for rank, step in enumerate(straggler)
    ],
    ["rank", *COLUMNS[2:], "exposed, %"],
    align="lrrrr",
)
record(
    sleep_milliseconds=SLEEP * 1e3,
    straggler_communication_0=straggler[0].communication.seconds * 1e3,
    straggler_communication_1=straggler[1].communication.seconds * 1e3,
    straggler_share_0=100 * straggler[0].communication.share,
    straggler_share_1=100 * straggler[1].communication.share,
)

# %% name="straggler-timeline"
drawn = {f"rank {trace.rank}": trace for trace in straggler_traces}
number = usual_step(straggler_traces[0]).name
draw_step(drawn, {name: recorded_steps(trace)[number] for name, trace in drawn.items()})

# %% [markdown]
# ## A benchmark that measures no communication
#
# The same loop twice, taking turns: as it is, and with the synchronisation switched off. The ranks
# of the second one train apart.

# %% name="never-synchronises"
BENCHMARK_ROUNDS, STEPS_OF_A_ROUND = 5, 4


def benchmark(rank: int) -> dict[bool, tuple[float, float]]:
    """Median seconds of a step, and the largest difference between the ranks' weights."""
    batches = [load_batch(step, rank) for step in range(STEPS_OF_A_ROUND)]
    models = {True: miniddp.SimpleDDP(build()), False: miniddp.SimpleDDP(build())}
    models[False].disable_grad_sync()  # the step calls sync_gradients, which does nothing
    optimizers = {way: torch.optim.AdamW(models[way].parameters(), lr=1e-3) for way in models}
    seconds: dict[bool, list[float]] = {way: [] for way in models}
    for _ in range(BENCHMARK_ROUNDS):
        for way, model in models.items():
            dist.barrier()
            start = clock()
            for batch in batches:
                take_step(model, optimizers[way], [batch])
            seconds[way].append((clock() - start) / STEPS_OF_A_ROUND)
    return {way: (statistics.median(seconds[way]), spread(models[way])) for way in models}


def spread(model: nn.Module) -> float:
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    low, high = weights.clone(), weights.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return (high - low).max().item()


found = miniddp.run_ranks(benchmark, WORLD_SIZE, timeout=300)[0]
assert found[True][1] == 0 < found[False][1]
table(
    [
        [
            "with `sync_gradients()`" if synchronised else "without it",
            f"{1e3 * seconds:.0f}",
            f"{apart:.1g}",
        ]
        for synchronised, (seconds, apart) in found.items()
    ],
    ["2 ranks", "ms per step", "largest difference of a weight"],
)
record(
    missing_share=100 * (1 - found[False][0] / found[True][0]),
    steps_apart=BENCHMARK_ROUNDS * STEPS_OF_A_ROUND,
)

# %% [markdown]
# ## A step of your own

# %% name="own-step"
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
done = subprocess.run(
    [*torchrun, own_step.__file__],
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=300,
    check=True,
)
print(done.stdout.strip())
assert len(list((folder / "traces").iterdir())) == WORLD_SIZE

# %% [markdown]
# ## The files


# %% name="files"
def write_traces(rank: int, all_ranks: bool) -> None:
    with Profiler(folder / f"all-{all_ranks}", Schedule(0, 0, 1, 2), all_ranks) as profiler:
        for _ in range(3):
            torch.ones(8).sum()
            profiler.step()
    dist.barrier()


for all_ranks in (False, True):
    miniddp.run_ranks(write_traces, WORLD_SIZE, all_ranks)
    names = sorted(path.name for path in (folder / f"all-{all_ranks}").iterdir())
    assert [name[:5] for name in names] == (["rank0", "rank1"] if all_ranks else ["rank0"])
    print(f"all_ranks={all_ranks}:", *names, sep="\n  ")
