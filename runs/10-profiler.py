# %% [markdown]
# # The profiler
#
# `torch.profiler`, parameter by parameter: which steps the schedule takes, what each parameter of
# `profile` adds to a trace, and what it costs a step.

# %% name="setup"
import inspect
import os
import tempfile
import textwrap
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 prints a line per recording otherwise

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import miniddp
from book import data_dir, provenance, record, table
from finetune.data import collate, encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from instruments import profiler_cost
from instruments.backend import backend_of
from instruments.flops import training_flops
from instruments.profiling import Profiler, Schedule, region
from instruments.trace import read_trace
from miniddp.process import device

warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # see acc_events below
WORLD_SIZE = 2
BACKEND = backend_of(WORLD_SIZE)
on_gpu = device().type == "cuda"
SIZE = "25m" if on_gpu else "tiny"
PAIRS = 32 if on_gpu else 16
provenance(device=device(), world_size=[1, WORLD_SIZE], backend=BACKEND)
folder = Path(tempfile.mkdtemp(prefix="traces-"))

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
def in_words(traces: list[list[int]]) -> str:
    return ", ".join(f"{steps[0]}–{steps[-1]}" for steps in traces) or "nothing"


traces_of = {
    (repeat, steps): profiler_cost.steps_in_traces(repeat, steps)
    for repeat in (1, 2, 0)
    for steps in (20, 30)
}
assert traces_of[1, 20] == traces_of[1, 30] == [[8, 9, 10, 11, 12]], "one cycle, then nothing"
assert traces_of[2, 30] == [[8, 9, 10, 11, 12], [16, 17, 18, 19, 20]]
assert traces_of[2, 20][1] == [16, 17, 18, 19], "training ends before step 20"
assert len(traces_of[0, 30]) > 2
table(
    [
        [f"repeat={repeat}", *(in_words(traces_of[repeat, steps]) for steps in (20, 30))]
        for repeat in (1, 2, 0)
    ],
    ["", "20 steps", "30 steps"],
    align="lll",
)

# %% [markdown]
# Two ways to an empty folder: a training that ends before the first recording, and a loop without
# `step()`.


# %% name="nothing-recorded" ranks="1"
def too_short(rank: int) -> int:
    with Profiler(folder / "too-short") as profiler:
        for _ in range(7):
            profiler.step()
    return len(profiler.traces)


short = miniddp.run_ranks(too_short, 1, backend=BACKEND)
assert short == [0]
assert profiler_cost.traces_without_step() == 0
print(textwrap.fill("seven steps: " + short.outputs[0], 64))
print("no step(): 0 traces, and no warning")

# %% [markdown]
# ## Every parameter of `profile`

# %% name="signature"
for name, parameter in inspect.signature(profile).parameters.items():
    print(f"{name} = {parameter.default}")

# %% [markdown]
# One process, the same training step, one parameter at a time. The settings take turns. Processor
# time is that of all threads of the process, and does not count what other programs use.

# %% name="cost"
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], SIZE, pretrained=False)
encoded = encode(pairs.select(range(PAIRS)), tokenizer, max_length=128)
batch = {name: tensor.to(device()) for name, tensor in collate(list(encoded), tokenizer).items()}
miniddp.set_seed(0)
model = load_model(SIZE, pretrained=False).to(device())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
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
ACTIVE = 2


def one_step() -> None:
    with region("forward"):
        loss = model(**batch).loss
    with region("backward"):
        loss.backward()
    with region("opt_step"):
        optimizer.step()
        optimizer.zero_grad()


torch.set_num_threads(1)
costs = profiler_cost.costs_of(one_step, SETTINGS, rounds=5, active=ACTIVE)
files = {name: folder / f"{name}.json" for name in SETTINGS}
for name, cost in costs.items():
    cost.recording.export_chrome_trace(str(files[name]))
bytes_of = {name: path.stat().st_size for name, path in files.items()}
plain = bytes_of["only the CPU's events"]
assert bytes_of["record_shapes"] > 1.1 * plain
assert bytes_of["profile_memory"] > 1.1 * plain
assert bytes_of["with_stack"] > 1.2 * plain
table(
    [
        ["no profiler", "1.00", "–"],
        *(
            [name, f"{cost.ratio:.2f}", f"{bytes_of[name] / ACTIVE / 1e6:.2f}"]
            for name, cost in costs.items()
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
by_shape = costs["record_shapes"].recording.key_averages(group_by_input_shape=True)
products = [event for event in by_shape if event.key == "aten::mm"]
assert all(not event.input_shapes for event in costs[DEFAULT].recording.key_averages())
assert len(products) > 1
for event in sorted(products, key=lambda event: -event.count)[:4]:
    print(f"{event.count:4} x aten::mm of {event.input_shapes[0]} and {event.input_shapes[1]}")


# %% name="memory"
def allocated(event: object) -> int:
    """Bytes that an operator itself allocated on this device, less what it freed."""
    return event.self_device_memory_usage if on_gpu else event.self_cpu_memory_usage


by_memory = sorted(costs["profile_memory"].recording.key_averages(), key=allocated, reverse=True)
assert allocated(by_memory[0]) > 0
assert all(allocated(event) == 0 for event in costs[DEFAULT].recording.key_averages())
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
by_operator = costs["with_flops"].recording.key_averages()
counted = sum(event.flops for event in by_operator)
products = sum(event.flops for event in by_operator if event.key == "aten::mm")
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
record(flops_ratio=ratio)

# %% name="modules"
hierarchy = [
    event
    for event in costs["with_modules"].recording.events()
    if getattr(event, "module_hierarchy", "")
]
assert not hierarchy
assert categories("with_modules").keys() == categories(DEFAULT).keys()
print("module hierarchies in the recording:", len(hierarchy))

# %% name="cycles"
last_cycle = profiler_cost.steps_kept(acc_events=False)
all_cycles = profiler_cost.steps_kept(acc_events=True)
assert (last_cycle, all_cycles) == (2, 4)
print("acc_events=False:", last_cycle, "steps")
print("acc_events=True: ", all_cycles, "steps")

# %% [markdown]
# ## The files


# %% name="files" ranks="2"
def write_traces(rank: int, all_ranks: bool) -> None:
    with Profiler(folder / f"all-{all_ranks}", Schedule(0, 0, 1, 2), all_ranks) as profiler:
        for _ in range(3):
            torch.ones(8).sum()
            profiler.step()
    dist.barrier()


for all_ranks in (False, True):
    miniddp.run_ranks(write_traces, WORLD_SIZE, all_ranks, backend=BACKEND)
    names = sorted(path.name for path in (folder / f"all-{all_ranks}").iterdir())
    assert [name[:5] for name in names] == (["rank0", "rank1"] if all_ranks else ["rank0"])
    print(f"all_ranks={all_ranks}:", *names, sep="\n  ")
