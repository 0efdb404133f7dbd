# %% [markdown]
# # Memory and sharding
#
# A training step keeps parameters, gradients and the optimizer's state. This run counts their bytes
# on every rank, under DDP and under what shards them, and compares the sums with
# `instruments.memory`. It also counts what each way sends, what it has at its peak, and whether it
# trains the same model.

# %% name="setup"
import gc
import os
import re
import tempfile
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

import miniddp
from book import FOREGROUND, MUTED, data_dir, figure, provenance, record, table
from finetune.data import collate, encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from instruments.cases import run_cases
from instruments.held import LiveBytes, StepBytes, bytes_of_step, model_states
from instruments.memory import Memory, bytes_per_parameter, memory_per_rank
from instruments.programs import run_torchrun
from instruments.sharded_training import (
    Way,
    ddp,
    difference_from_one_process,
    reached_within,
    step,
    torch_in_bf16,
    torch_zero1,
    torch_zero3,
    zero1,
    zero3,
    zero3_in_one_unit,
    zero3_keeps,
)
from instruments.traffic import Traffic
from miniddp.process import device

CPU = torch.device("cpu")
SIZES = ("25m", "135m", "360m") if device().type == "cuda" else ("tiny", "5m", "25m")
SMALL, SIZE, _ = SIZES
SEQUENCES = 4
MB = 1e6
provenance(device=device(), world_size=[1, 2, 4], backend="gloo")
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], "tiny", pretrained=False)
encoded = encode(pairs.select(range(min(512, len(pairs)))), tokenizer, max_length=64)
longest = max(encoded, key=lambda pair: len(pair["input_ids"]))
print(f"{SEQUENCES} sequences of {len(longest['input_ids'])} tokens at most on each rank")


def batch_of(start: int, sequences: int, where: torch.device) -> dict[str, Tensor]:
    """Some pairs, padded to the longest of all pairs."""
    chosen = [encoded[(start + i) % len(encoded)] for i in range(sequences)]
    padded = collate([*chosen, longest], tokenizer)
    return {name: tensor[:-1].to(where) for name, tensor in padded.items()}


def build(size: str, where: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    miniddp.set_seed(0)
    return load_model(size, pretrained=False).to(where, dtype)


def place_of(way: Way) -> torch.device:
    """The CPU for `fully_shard`: on a GPU it needs NCCL, and ranks that share a GPU cannot."""
    return CPU if way in (torch_zero3, torch_in_bf16) else device()


def count_parameters(size: str) -> int:
    return sum(parameter.numel() for parameter in build(size, CPU).parameters())


# %% [markdown]
# ## A model that is too large
#
# Each rank may take `BUDGET` bytes more than it has when it starts: the operating system refuses
# the rest, as a GPU would. Linux only, and in the CPU's memory.


# %% name="too-large" ranks="4"
BUDGET = 400e6
LARGE = "25m"


def train_within(rank: int, way: Way) -> str:
    batch = batch_of(rank, 1, CPU)
    return reached_within(BUDGET, way, lambda: build(LARGE, CPU), batch)


endings = {
    "DDP": miniddp.run_ranks(train_within, 4, ddp, timeout=300),
    "in shards": miniddp.run_ranks(train_within, 4, zero3, timeout=300),
}
assert set(endings["DDP"]) == {"step 1, optimizer.step(): can't allocate memory"}
assert set(endings["in shards"]) == {"two steps done"}
for name, ranks in endings.items():
    for rank, ending in enumerate(ranks):
        print(f"{name:9} | rank {rank} | {ending}")
large = count_parameters(LARGE)
record(budget_mb=BUDGET / MB, large_parameters_mb=4 * large / MB, large_states_mb=16 * large / MB)

# %% [markdown]
# ## What a rank holds between two steps
#
# Lines: the formulas of `instruments.memory`. Points: what the fullest of 1, 2 and 4 ranks holds.


# %% name="savings-figure" ranks="1 2 4"
def held_after_a_step(rank: int, way: Way) -> Memory:
    trained = way(build(SIZE, device()))
    step(trained, batch_of(rank * SEQUENCES, SEQUENCES, device()))
    return model_states(*trained)


count = count_parameters(SIZE)
bytes_each = bytes_per_parameter("adam")
ranks = [2**i for i in range(7)]
fig, axes = plt.subplots()
for stage, dashes in enumerate(("-", "--", "-.", ":")):
    sums = [memory_per_rank(count, n, stage, bytes_each).total / count for n in ranks]
    axes.plot(ranks, sums, dashes, color=FOREGROUND if stage else MUTED)
    axes.annotate(
        f"ZeRO-{stage}" if stage else "DDP",
        (ranks[-1], sums[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
    )
ways = {0: ddp, 1: zero1, 3: zero3}
for n in (1, 2, 4):
    found = run_cases(held_after_a_step, n, [(way,) for way in ways.values()])
    for stage, held in zip(ways, found, strict=True):
        fullest = max(memory.total for memory in held)
        predicted = memory_per_rank(count, n, stage, bytes_each).total
        assert 0.98 * predicted < fullest < 1.1 * predicted, (stage, n, held)
        axes.plot(n, fullest / count, "o", color=FOREGROUND)
axes.set(xlabel="ranks", ylabel="bytes per parameter", ylim=(0, 17))
axes.set_xscale("log", base=2)
axes.set_xticks(ranks, [str(n) for n in ranks])
figure(fig)

# %% [markdown]
# ## What a step sends
#
# Counted is what a rank receives, which over all ranks is what they send. An all-reduce counts as
# that of a ring.


# %% name="traffic" ranks="2 4"
def receive(rank: int, way: Way) -> float:
    """The bytes that a step brings to this rank; the first two build buckets and state."""
    where = place_of(way)
    trained = way(build(SMALL, where))
    batch = batch_of(rank * SEQUENCES, SEQUENCES, where)
    step(trained, batch)
    step(trained, batch)
    with Traffic() as traffic:
        step(trained, batch)
    return traffic.received


EXPECTED = {
    "DDP": (ddp, "all-reduce", 2),
    "ShardedOptimizer": (zero1, "all-reduce, then parameters", 3),
    "torch's ZeRO-1": (torch_zero1, "all-reduce, then parameters", 3),
    "FullyShardedModule": (zero3, "two all-gathers, reduce-scatter", 3),
    "FullyShardedModule, keeps": (zero3_keeps, "one all-gather, reduce-scatter", 2),
    "fully_shard": (torch_zero3, "two all-gathers, reduce-scatter", 3),
    "fully_shard, bfloat16": (torch_in_bf16, "the same, all-gathers half as large", 2),
}
parameter_bytes = 4 * count_parameters(SMALL)
ways = [(way,) for way, _, _ in EXPECTED.values()]
for n in (2, 4):
    lines = []
    for received, (name, (_, what, expected)) in zip(
        run_cases(receive, n, ways), EXPECTED.items(), strict=True
    ):
        volume = sum(received) / n / parameter_bytes / ((n - 1) / n)
        assert abs(volume - expected) < 0.1, (name, n, volume)
        lines.append([name, what, f"{volume:.2f}"])
table(lines, ["", "what travels in a step", "times Ψ"], align="llr")

# %% [markdown]
# ## The same model?
#
# Three steps of Adam in float64, against one process on the joined batch.


# %% name="parity" ranks="2"
def compare(rank: int, way: Way) -> float:
    where = place_of(way)
    sequences = dist.get_world_size() * SEQUENCES
    batches = [batch_of(i * sequences, sequences, where) for i in range(3)]
    return difference_from_one_process(way, lambda: build(SMALL, where, torch.float64), batches)


TOLERANCE = 1e-9
ways = [ddp, zero1, torch_zero1, zero3, torch_zero3]
for way, differences in zip(ways, run_cases(compare, 2, [(way,) for way in ways]), strict=True):
    assert max(differences) < TOLERANCE, (way, differences)
record(tolerance=TOLERANCE)

# %% [markdown]
# ## The peak of a step, and the activations
#
# Every tensor that a step makes is watched, from its birth to its end.


# %% name="peak" ranks="4"
def measure_step(
    rank: int, way: Way, size: str, sequences: int, recompute: bool = False
) -> StepBytes:
    model = build(size, device())
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    module, optimizer = way(model)
    batch = batch_of(rank * sequences, sequences, device())
    for _ in range(2):  # buckets and state are there from the third step on
        step((module, optimizer), batch)
    optimizer.zero_grad()
    gc.collect()
    return bytes_of_step(module, optimizer, batch)


WAYS = {
    "DDP": ddp,
    "ZeRO-1, ShardedOptimizer": zero1,
    "ZeRO-3, a unit per layer": zero3,
    "ZeRO-3, keeps what it gathers": zero3_keeps,
    "ZeRO-3, all in one unit": zero3_in_one_unit,
}
lines = []
peaks = {}
cases = [(way, SIZE, SEQUENCES) for way in WAYS.values()]
for name, found in zip(WAYS, run_cases(measure_step, 4, cases), strict=True):
    before = max(of_rank.before for of_rank in found) / MB
    kept = max(of_rank.kept for of_rank in found) / MB
    peaks[name] = max(of_rank.peak for of_rank in found) / MB
    lines.append([name, f"{before:.1f}", f"{kept:.1f}", f"{peaks[name]:.1f}"])
table(lines, ["MB, fullest of 4 ranks", "before", "kept", "peak"])
assert peaks["ZeRO-3, a unit per layer"] < peaks["ZeRO-3, all in one unit"]
assert peaks["ZeRO-3, a unit per layer"] < peaks["ZeRO-3, keeps what it gathers"]
assert peaks["ZeRO-3, a unit per layer"] < peaks["ZeRO-1, ShardedOptimizer"] < peaks["DDP"]


# %% name="activations" ranks="2"
BATCHES = (1, 4, 16)
cases = [(ddp, SMALL, n) for n in BATCHES]
cases += [(zero3, SMALL, n) for n in BATCHES]
cases += [(ddp, SMALL, n, True) for n in BATCHES]
kept = [ranks[0].kept / MB for ranks in run_cases(measure_step, 2, cases)]
lines = []
for n, plain, sharded, recomputed in zip(BATCHES, kept[:3], kept[3:6], kept[6:], strict=True):
    assert abs(sharded / plain - 1) < 0.1
    assert recomputed < 0.5 * plain
    lines.append([n, f"{plain:.1f}", f"{sharded:.1f}", f"{recomputed:.1f}"])
columns = ["batch per rank", "DDP, MB", "ZeRO-3, MB", "DDP, checkpointing, MB"]
table(lines, columns, align="rrrr")
record(model_states_mb=16 * count_parameters(SMALL) / MB)

# %% [markdown]
# ## Autocast's copies
#
# A batch of two tokens has hardly any activations. What forward leaves behind are then the weights
# that autocast has cast to bfloat16.


# %% name="autocast" ranks="1"
def kept_by_forward(rank: int, autocast: bool) -> float:
    """Bytes that one forward leaves behind for each weight of a linear layer."""
    model = build(SIZE, CPU)
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    ids = torch.tensor([[1, 2]])
    with LiveBytes(model.parameters()) as live:
        before = live.now()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids[:, 0]).loss
        kept = live.now() - before
        assert loss.requires_grad
    return kept / sum(weight.numel() for weight in weights)


[[in_fp32], [under_autocast]] = run_cases(kept_by_forward, 1, [(False,), (True,)])
assert abs(in_fp32) < 0.1
assert abs(under_autocast - 2) < 0.1
lines = [["float32", f"{in_fp32:.2f}"], ["bfloat16, autocast", f"{under_autocast:.2f}"]]
table(lines, ["forward in", "bytes kept per weight"], align="lr")

# %% [markdown]
# ## Rank 0's file alone


# %% name="saved-alone" ranks="1 4"
def save_alone(rank: int, file: str) -> None:
    warnings.simplefilter("ignore")
    model, _ = torch_zero3(build(SMALL, CPU))
    if rank == 0:
        torch.save(model.state_dict(), file)


def load_alone(rank: int, file: str) -> str:
    try:
        build(SMALL, CPU).load_state_dict(torch.load(file))
    except RuntimeError as error:
        return str(error)
    return "loaded"


with tempfile.TemporaryDirectory() as folder:
    file = os.path.join(folder, "model.pt")
    miniddp.run_ranks(save_alone, 4, file, timeout=300)
    in_file = os.path.getsize(file)
    reason = miniddp.run_ranks(load_alone, 1, file, timeout=300)[0]
assert in_file < 0.3 * parameter_bytes
assert "got mixed torch.Tensor and DTensor" in reason
print(f"the model:          {parameter_bytes / MB:.2f} MB")
print(f"rank 0's file:      {in_file / MB:.2f} MB")
print("in a plain model:   " + re.search("got mixed .*? and DTensor", reason)[0])

# %% [markdown]
# ## On paper: 7 billion parameters on 8 GPUs of 80 GB


# %% name="paper" badge="computed"
PARAMETERS, GPUS, GB = 7 * 10**9, 8, 1e9
lines = []
for precision in ("fp32", "mixed"):
    for stage in range(4):
        need = memory_per_rank(PARAMETERS, GPUS, stage, bytes_per_parameter("adam", precision))
        kinds = (need.parameters, need.gradients, need.optimizer, need.total)
        left = 80 - need.total / GB
        lines.append(
            [
                precision,
                f"ZeRO-{stage}" if stage else "DDP",
                *(f"{kind / GB:.1f}" for kind in kinds),
                f"{left:.1f}" if left > 0 else "does not fit",
            ]
        )
columns = ["precision", "method", "parameters", "gradients", "Adam, copy", "sum, GB", "left of 80"]
table(lines, columns, align="llrrrrr")

# %% [markdown]
# ## On paper: models that others trained
#
# As many parameters as published, Adam in fp32. Where it makes a difference: on each of 8 GPUs, and
# on each of 64.

# %% name="models" badge="computed"
BILLIONS = {"ResNet-50": 0.0256, "BERT-Large": 0.34, "Llama 3 70B": 70, "GPT-3": 175}
lines = []
for name, billions in BILLIONS.items():
    line = [name, billions]
    for stage in range(4):
        shown = []
        for n in (8, 64):
            need = memory_per_rank(int(billions * 1e9), n, stage, bytes_each)
            gigabytes = need.total / GB
            shown.append(f"{gigabytes:,.{2 if gigabytes < 10 else 0}f}")
        line.append(" / ".join(dict.fromkeys(shown)))
    lines.append(line)
columns = ["GB, 8 / 64 GPUs", "10⁹ parameters", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
table(lines, columns, align="lrrrrr")

# %% [markdown]
# ## Stage 7, and the same program sharded


# %% name="stage" ranks="2"
def printed_by(program: str) -> list[list[str]]:
    text = run_torchrun(2, program, STEPS="20", CUDA_VISIBLE_DEVICES="")
    return [line.rsplit(maxsplit=1) for line in text.splitlines()]


lines = []
whole = printed_by("stages/7_ddp.py")
in_shards = printed_by("runs/sharded.py")
for (what, loss), (also, sharded) in zip(whole, in_shards, strict=True):
    assert what == also
    assert abs(float(loss) - float(sharded)) < 1e-3
    lines.append([what, loss, sharded])
table(lines, ["", "stage 7", "sharded"])
