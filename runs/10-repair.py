# %% [markdown]
# # A slow step, repaired measure by measure
#
# A training step as it is often written first: every pair padded to the same length, one message
# per parameter after backward, full precision, the loss read in every step. Then one measure after
# the other, each tried against the step as repaired so far, and kept only if it pays. Last come the
# two that change the training too, since an update takes more pairs with them.
#
# With GPUs: SmolLM2-360M's architecture with random weights, one rank or two over NCCL. Without: a
# small model of the same architecture, two ranks over Gloo, and the measures that a CPU can take.

# %% name="setup"
import os
import statistics
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 prints a line per recording otherwise

import matplotlib.pyplot as plt
import torch
from torch import nn

import miniddp
from book import FOREGROUND, SURFACE, WAITING, data_dir, figure, provenance, record, table
from finetune.data import encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from instruments import remedies
from instruments.backend import backend_of
from instruments.flops import training_flops, utilisation
from instruments.published_effects import effects
from instruments.slow_step import Pairs, Settings
from miniddp.process import device

on_gpu = device().type == "cuda"
SIZE = "360m" if on_gpu else "tiny"
WORLD_SIZE = min(2, torch.cuda.device_count()) if on_gpu else 2
BACKEND = backend_of(WORLD_SIZE)
SMALL = 8
LARGE = 128 if on_gpu else 16
MICRO_BATCHES = 16 if on_gpu else 4  # in a pass
ROUNDS = 9
MAX_LENGTH = 128
provenance(device=device(), world_size=WORLD_SIZE, backend=BACKEND)
data = load_mrpc(data_dir())
sentences = data[:]
tokenizer = load_tokenizer(sentences["sentence1"] + sentences["sentence2"], SIZE, pretrained=False)
encoded = list(encode(data, tokenizer, MAX_LENGTH))
lengths = sorted(len(row["input_ids"]) for row in encoded)
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
SLOW = Settings(batch_size=SMALL)
MEASURES = remedies.remedies(LARGE)
for measure in MEASURES:
    print(measure.name)

# %% [markdown]
# ## The data
#
# The slow way: pairs in random order, all padded to the greatest length. The other way: a batch has
# pairs of like lengths, and is padded to the longest of them.

# %% name="data"
pairs = Pairs(encoded, tokenizer, WORLD_SIZE, MICRO_BATCHES, MAX_LENGTH)

# %% [markdown]
# ## One pass
#
# The training loop is `instruments.slow_step.train_pass`. Every measure is a line in it, or in
# `prepare`, which wraps a copy of this model and makes its optimizer.


# %% name="prepare"
def build() -> nn.Module:
    miniddp.set_seed(0)
    return load_model(SIZE, pretrained=False)


# %% name="train-pass"
def repair(rank: int) -> remedies.Repair:
    """Train in the slow way, and with one measure more after the other."""
    return remedies.repair(rank, build(), pairs, MEASURES, ROUNDS, SLOW)


# %% [markdown]
# ## What is measured
#
# The step as repaired so far and the step with one more measure take turns, pass by pass, so that
# whatever else the machine does slows both. Each round gives one ratio of their speeds in real
# tokens per second, padding left out. A measure is kept if it was faster in so many rounds that few
# useless ones would be. The clock waits for the device, and a pass takes as long as on the slowest
# rank.

# %% name="measure"
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


on_each_rank = [found.before.parts() for found in ranks]
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


# %% name="repair"
def row_of(trial: remedies.Trial) -> list[str]:
    measure = trial.remedy
    share = trial.avoidable
    bound = "–" if share is None else f"{1 / (1 - share):.2f}"
    if trial.failure:
        return [measure.name, f"did not run ({trial.failure})", bound, "–", "–", ""]
    brought = f"{statistics.median(trial.ratios):.2f}"
    faster = sum(ratio > 1 for ratio in trial.ratios)
    return [measure.name, measure.saves, bound, brought, faster, "yes" if trial.kept else "no"]


table(
    map(row_of, trials),
    ["measure", "saves", "at most ×", "brought ×", f"faster, of {ROUNDS}", "kept"],
    align="llrrrl",
)
speedup = statistics.median(ranks[0].faster)
alike = statistics.median(ranks[0].faster_alike)
assert speedup > 1.3, "the repair pays"
for state in (before, after):
    assert all(0 < loss < 3 for loss in state.losses), "it trains no more"
trial_of = {trial.remedy.name: trial for trial in trials}
fused = trial_of["fused AdamW"]
sdpa = trial_of["SDPA attention"]
buckets = trial_of["buckets during backward"]
bf16 = trial_of["bf16 autocast"]
if sdpa.tried:
    record(sdpa=statistics.median(sdpa.ratios), sdpa_aim=100 * sdpa.step.share("attention"))
record(
    fused_share=100 * fused.avoidable,
    fused_at_most=1 / (1 - fused.avoidable),
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
differences = {
    trial.remedy.name: trial.loss_difference
    for trial in trials
    if not trial.failure and not trial.remedy.changes_losses
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


# %% name="elsewhere" badge="computed"
def times(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:.2f}"


found = {effect.remedy: effect for effect in effects()}
rows = []
for name, effect in found.items():
    others = [f"{factor:.2f}, {who}" for who, factor in effect.others.items()]
    rows.append([name, times(effect.a100), times(effect.gpt2), "; ".join(others) or "–"])
table(rows, ["measure", "GPT, A100", "GPT‑2", "others"], align="lrrl")
compiling = found["torch.compile"]
accumulating = found["accumulation of 4"].others
record(
    compile_a100=compiling.a100,
    compile_gpt2=compiling.gpt2,
    compile_8b=compiling.others["Llama 8B on 8 H100"],
    buckets_h100=found["buckets during backward"].others["8 H100 in a node"],
    no_sync_one_node=accumulating["2 T4 in a node"],
    no_sync_two_nodes=accumulating["in two nodes"],
)

# %% [markdown]
# ## Before and after
#
# Where the time of a step goes, of the slow one and of the repaired one, and the part of the
# hardware's peak that the model makes use of. The peak is that of bf16 products in NVIDIA's data
# sheet, or on a CPU the measured one, in the step's precision, on all ranks at once.


# %% name="before-after"
slow_peak = sum(found.peaks[0] for found in ranks)
repaired_peak = sum(found.peaks[1] for found in ranks)
template = build()
embedding = template.get_input_embeddings().weight.numel()
multiplying = sum(parameter.numel() for parameter in template.parameters()) - embedding
flops = training_flops(multiplying, before.tokens)  # both of the same real tokens
mfu = 100 * utilisation(flops, before.seconds, slow_peak)
best_mfu = 100 * utilisation(flops, before.seconds / speedup, repaired_peak)
shares = [before.parts(), after.parts()]
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
        length * sum(of_step[part] for part in parts)
        for length, of_step in zip(lengths_of_bars, shares, strict=True)
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
    peak_tflops=slow_peak / 1e12,
    multiplying_millions=multiplying / 1e6,
)
