# %% [markdown]
# # Buckets and overlap
#
# Gradients travel in buckets, while backward still computes the rest. This run records one such
# backward pass, plans buckets by hand and counts when each one can leave, watches PyTorch and
# miniddp change their buckets after the first pass, measures memory, time and what each
# communication hook sends, and shows what an order that differs between ranks does.

# %% name="setup"
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.futures import Future

import miniddp
from book import (
    FOREGROUND,
    MUTED,
    RANK_COLORS,
    data_dir,
    figure,
    provenance,
    record,
    show_ranks,
    table,
    timeline,
)
from instruments.simulator import even_layers, simulate
from instruments.timeline import Timeline
from miniddp.bucket import MIB, plan_buckets
from miniddp.data import collate, encode, load_mrpc
from miniddp.hooks import (
    PowerSGDState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    powerSGD_hook,
)
from miniddp.model import load_model, load_tokenizer
from miniddp.process import device

provenance(device=device(), world_size=2, backend="gloo")
warnings.filterwarnings("ignore")
rows = load_mrpc(data_dir())[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], "5m", pretrained=False)
encoded = encode(load_mrpc(data_dir()).select(range(16)), tokenizer, max_length=64)

Torch = nn.parallel.DistributedDataParallel
CLASSES = {"torch": Torch, "miniddp": miniddp.DistributedDataParallel}


def build(size: str = "5m") -> nn.Module:
    miniddp.set_seed(0)
    return load_model(size, pretrained=False).to(device())


def batch_of(rank: int, pairs: int = 4) -> dict[str, Tensor]:
    part = [encoded[rank * pairs + i] for i in range(pairs)]
    return {name: tensor.to(device()) for name, tensor in collate(part, tokenizer).items()}


model = build()
names = [name for name, _ in model.named_parameters()]
num_bytes = [parameter.nbytes for parameter in model.parameters()]
record(
    parameters=len(names),
    millions=sum(p.numel() for p in model.parameters()) / 1e6,
    gradient_mib=sum(num_bytes) / MIB,
)

# %% [markdown]
# ## One backward pass
#
# Four passes; shown is the last one. The buckets are smaller than the default, so that this small
# model has several.

# %% name="timeline"
TIMELINE_CAP = 4


def one_pass(rank: int) -> tuple[str, list[list[str]]]:
    ddp = miniddp.DistributedDataParallel(build(), bucket_cap_mb=TIMELINE_CAP)
    batch = batch_of(rank, pairs=8)
    recorder = Timeline(ddp)
    for _ in range(4):
        ddp.zero_grad()
        loss = ddp(**batch).loss
        recorder.note("backward")
        loss.backward()
        recorder.note("end")
    return recorder.to_json(), [[names[i] for i in b.indices] for b in ddp.reducer.buckets]


passes = miniddp.run_ranks(one_pass, 2, timeout=120)
assert passes[0][1] == passes[1][1], "the same buckets on every rank"
timeline([recording for recording, _ in passes], parameters=passes[0][1])

# %% name="timeline-values"
record(timeline_buckets=len(passes[0][1]), timeline_cap=TIMELINE_CAP)

# %% [markdown]
# ## A plan on paper
#
# Three layers, 6,928 bytes of gradients. The caps are 512 bytes for the first bucket and 4,096
# bytes for the others.


# %% name="plan"
def small_model() -> nn.Sequential:
    miniddp.set_seed(0)
    layers = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    return nn.Sequential(*layers).to(device())


small = dict(small_model().named_parameters())
sizes = [parameter.nbytes for parameter in small.values()]
last_first = list(reversed(range(len(small))))
plan = plan_buckets(sizes, ["float32"] * len(small), last_first, 4096, 512)
for number, bucket in enumerate(plan):
    print(f"bucket {number}: {sum(sizes[i] for i in bucket):,} bytes")
    for i in bucket:
        print(f"  {list(small)[i]:9} {sizes[i]:5,}")
assert [sum(sizes[i] for i in bucket) for bucket in plan] == [528, 4224, 2176]

# %% [markdown]
# ## In which order
#
# Hooks note in which order backward produces the gradients of the language model. The same cap,
# with the parameters in this order, from last to first, and in the model's own order: after how
# many gradients can each bucket leave? Each waits for the buckets before it.


# %% name="order"
def ready_order(model: nn.Module) -> list[int]:
    order: list[int] = []
    for i, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    model(**batch_of(0, pairs=1)).loss.backward()
    return order


def leaves_after(plan: Sequence[Sequence[int]], ready: Sequence[int]) -> list[int]:
    """For each bucket, how many gradients backward has produced when it can be sent."""
    moment = {i: number for number, i in enumerate(ready, 1)}
    return list(accumulate((max(moment[i] for i in bucket) for bucket in plan), max))


ready = ready_order(build())
cap = TIMELINE_CAP * MIB
orders = {
    "as they become ready": ready,
    "last to first": range(len(names))[::-1],
    "the model's own": range(len(names)),
}
plans = {
    name: plan_buckets(num_bytes, [0] * len(names), order, cap, cap)
    for name, order in orders.items()
}
leaves = {name: leaves_after(plan, ready) for name, plan in plans.items()}
table(
    [[name, len(plans[name]), " · ".join(map(str, numbers))] for name, numbers in leaves.items()],
    ["order", "buckets", f"sent after … of {len(names)} gradients"],
    align="lrl",
)
assert max(leaves["as they become ready"][0], leaves["last to first"][0]) < len(names) / 3
assert set(leaves["the model's own"]) == {len(names)}, "nothing leaves before the end of backward"
record(
    first_leaves_after=leaves["as they become ready"][0],
    furthest=max(abs(len(names) - 1 - place - i) for place, i in enumerate(ready)),
)


# %% [markdown]
# ## What leaves when, in torch and in miniddp
#
# A communication hook sees each bucket as it is sent. It notes the size, and how many gradients
# there are by then.


# %% name="probe"
class Probe:
    """Notes for each bucket that is sent: its bytes, and the gradients that are there by then."""

    def __init__(self, module: nn.Module) -> None:
        self.gradients = 0
        self.sent: list[tuple[int, int]] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.count)

    def count(self, _: Tensor) -> None:
        self.gradients += 1

    def hook(self, state: None, bucket) -> Future[Tensor]:
        self.sent.append((bucket.buffer().nbytes, self.gradients))
        return allreduce_hook(state, bucket)

    def start_over(self) -> None:
        self.gradients, self.sent = 0, []


def watch_steps(
    rank: int,
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    steps: int,
    kind: str,
    **options: Any,
) -> list[list[tuple[int, int]]]:
    """What a probe has noted in each step, of torch's class or miniddp's."""
    module = build()
    probe = Probe(module)
    ddp = CLASSES[kind](module, **options)
    ddp.register_comm_hook(None, probe.hook)
    noted = []
    for _ in range(steps):
        probe.start_over()
        loss_of(ddp).backward()
        noted.append(probe.sent)
    return noted


# %% [markdown]
# A model that lists its layers from the last to the first: what `reversed` makes of it is the order
# in which *forward* uses them. Nobody can know the order of backward before the first pass.


# %% name="rebuild"
class ListedBackwards(nn.Module):
    """Eight layers of 256 KiB; the first to be used is the last in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            inputs = layer(inputs).tanh()
        return inputs


def listed_backwards() -> nn.Module:
    miniddp.set_seed(0)
    return ListedBackwards().to(device())


def square(ddp: nn.Module) -> Tensor:
    return ddp(torch.ones(2, 256, device=device())).square().mean()


def places(sent: Iterable[tuple[int, int]]) -> str:
    return " ".join(str(gradients) for _, gradients in sent)


def rebuild(rank: int) -> dict[str, list[list[tuple[int, int]]]]:
    return {
        kind: watch_steps(rank, listed_backwards, square, 2, kind, bucket_cap_mb=0.5)
        for kind in CLASSES
    }


rebuilt = miniddp.run_ranks(rebuild, 2)[0]
lines = [
    [kind, step, len(sent), places(sent)]
    for kind, steps in rebuilt.items()
    for step, sent in enumerate(steps, 1)
]
table(lines, ["class", "pass", "buckets", "sent after … of 8"], align="lrrl")
assert rebuilt["torch"] == rebuilt["miniddp"], "the same buckets, sent at the same moments"
assert places(rebuilt["torch"][0]) == "8", "one bucket, sent at the end"
assert places(rebuilt["torch"][1]) == "2 4 6 8"

# %% [markdown]
# The larger language model with the default caps: 1 MiB for the first bucket, then 25 MiB.


# %% name="first-pass"
def loss_of_language_model(ddp: nn.Module) -> Tensor:
    return ddp(**batch_of(dist.get_rank(), pairs=1)).loss


def default_buckets(rank: int) -> dict[str, list[list[tuple[int, int]]]]:
    def large() -> nn.Module:
        return build("25m")

    return {kind: watch_steps(rank, large, loss_of_language_model, 2, kind) for kind in CLASSES}


defaults = miniddp.run_ranks(default_buckets, 2, timeout=180)[0]
lines = [
    [kind, step, " ".join(f"{size / MIB:.1f}" for size, _ in sent), places(sent)]
    for kind, steps in defaults.items()
    for step, sent in enumerate(steps, 1)
]
count = len(list(build("25m").parameters()))
table(lines, ["class", "pass", "buckets in MiB", f"sent after … of {count}"], align="lrll")
assert defaults["torch"] == defaults["miniddp"], "the same buckets, sent at the same moments"
assert len(defaults["torch"][0]) == 1 < len(defaults["torch"][1])
record(
    large_mib=defaults["torch"][0][0][0] / MIB,
    large_count=count,
    first_bucket_mib=defaults["torch"][1][0][0] / MIB,
    second_bucket_mib=defaults["torch"][1][1][0] / MIB,
)

# %% [markdown]
# ## The loop stays what it was
#
# The same function trains one process, torch's class and miniddp's. The gradients of the two
# classes are compared with the mean of the ranks' own.


# %% name="loop"
def train_step(model: nn.Module, batch: dict[str, Tensor], optimizer: Any) -> None:
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()


def compare_gradients(rank: int) -> dict[str, float]:
    found = {}
    models = {"alone": build(), **{kind: wrap(build()) for kind, wrap in CLASSES.items()}}
    for kind, ddp in models.items():
        train_step(ddp, batch_of(rank), torch.optim.SGD(ddp.parameters(), lr=0))
        found[kind] = torch.cat([p.grad.flatten() for p in ddp.parameters()])
    mean = found["alone"] / dist.get_world_size()
    dist.all_reduce(mean)
    return {kind: ((found[kind] - mean).norm() / mean.norm()).item() for kind in found}


differences = miniddp.run_ranks(compare_gradients, 2, timeout=120)
for values in differences:
    assert values["alone"] > 0.1
    assert values["torch"] < 1e-5
    assert values["miniddp"] < 1e-5
table(
    [[kind, *(f"{values[kind]:.1g}" for values in differences)] for kind in differences[0]],
    ["model", "rank 0", "rank 1"],
    align="lrr",
)

# %% [markdown]
# ## Gradients as views
#
# The bytes behind all gradients and all buckets, each piece of memory counted once.


# %% name="views"
def memory(rank: int, kind: str, view: bool) -> float:
    """MiB of the gradients and of the buckets they travel in."""
    pieces: dict[int, int] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        pieces[storage.data_ptr()] = storage.nbytes()

    def hook(state: None, bucket) -> Future[Tensor]:
        note(bucket.buffer())
        return allreduce_hook(state, bucket)

    ddp = CLASSES[kind](build(), gradient_as_bucket_view=view, bucket_cap_mb=TIMELINE_CAP)
    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        pieces.clear()
        ddp(**batch_of(rank, pairs=1)).loss.backward()
    for parameter in ddp.parameters():
        note(parameter.grad)
    return sum(pieces.values()) / MIB


def all_memory(rank: int) -> dict[tuple[str, bool], float]:
    return {(kind, view): memory(rank, kind, view) for kind in CLASSES for view in (False, True)}


found = miniddp.run_ranks(all_memory, 2, timeout=120)[0]
gradient_mib = sum(num_bytes) / MIB
for kind in CLASSES:
    assert 1.9 < found[kind, False] / gradient_mib < 2.1
    assert 0.95 < found[kind, True] / gradient_mib < 1.05
table(
    [[kind, f"{found[kind, False]:.1f}", f"{found[kind, True]:.1f}"] for kind in CLASSES],
    ["class", "MiB without views", "MiB with views"],
    align="lrr",
)
record(mib_copies=found["miniddp", False], mib_views=found["miniddp", True])

# %% [markdown]
# ## The same order on every rank
#
# Two buckets of equal size, `a` and `b`. Rank 0 starts with `a`, rank 1 with `b`.


# %% name="mixed"
def send_in_own_order(rank: int) -> dict[str, float]:
    values = {"a": 1.0, "b": 100.0} if rank == 0 else {"a": 3.0, "b": 300.0}
    buckets = {name: torch.full((2,), value, device=device()) for name, value in values.items()}
    for name in "ab" if rank == 0 else "ba":
        buckets[name] /= 2
        dist.all_reduce(buckets[name])
        print(f"{name}: own {values[name]:.0f}, afterwards {buckets[name][0].item():.1f}")
    return {name: bucket[0].item() for name, bucket in buckets.items()}


mixed = miniddp.run_ranks(send_in_own_order, 2)
assert list(mixed) == [{"a": 150.5, "b": 51.5}, {"a": 51.5, "b": 150.5}]
show_ranks(mixed)


# %% [markdown]
# ## Parameters that are not used
#
# A body of six layers, and two heads that come last in the model. The loss uses the left head only.


# %% name="unused"
class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        self.left = nn.Linear(256, 256, bias=False)
        self.right = nn.Linear(256, 256, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.left(self.body(inputs))


def two_heads(frozen: bool) -> nn.Module:
    miniddp.set_seed(0)
    model = TwoHeads()
    model.right.requires_grad_(not frozen)
    return model.to(device())


def watch_unused(rank: int, kind: str, frozen: bool) -> list[tuple[int, int]]:
    return watch_steps(
        rank,
        lambda: two_heads(frozen),
        square,
        3,
        kind,
        bucket_cap_mb=0.5,
        find_unused_parameters=not frozen,
    )[-1]


def watch_all_unused(rank: int) -> dict[tuple[str, bool], list[tuple[int, int]]]:
    return {
        (kind, frozen): watch_unused(rank, kind, frozen)
        for kind in CLASSES
        for frozen in (False, True)
    }


unused = miniddp.run_ranks(watch_all_unused, 2)[0]
table(
    [
        [kind, "frozen" if frozen else "unused", places(sent)]
        for (kind, frozen), sent in unused.items()
    ],
    ["class", "head", "sent after … of 7"],
)
for frozen in (True, False):
    assert unused["torch", frozen] == unused["miniddp", frozen]
    assert unused["torch", frozen][0][1] < 7, "no bucket waits for what will not come"

# %% [markdown]
# Without the option: when does a class notice that the right head got no gradient, and does its
# error name the parameter?


# %% name="noticed"
def notices(kind: str, **options: Any) -> tuple[str, bool]:
    ddp = CLASSES[kind](two_heads(frozen=False), **options)
    loss, moment = square(ddp), "this backward"
    try:
        loss.backward()
        moment = "the next forward"
        square(ddp)
    except RuntimeError as error:
        return moment, "right.weight" in str(error)
    return "no", False


def all_notice(rank: int) -> dict[str, tuple[str, bool]]:
    return {
        "torch": notices("torch"),
        "miniddp": notices("miniddp"),
        "miniddp, `check_reduction=True`": notices("miniddp", check_reduction=True),
    }


noticed = miniddp.run_ranks(all_notice, 2)
table(
    [[kind, moment, "yes" if named else "no"] for kind, (moment, named) in noticed[0].items()],
    ["class", "raises in", "names it"],
)
late = "the next forward"
for on_rank in noticed:
    assert list(on_rank.values()) == [(late, False), (late, True), ("this backward", True)]

# %% [markdown]
# ## What a hook sends, and what it costs in precision
#
# The same gradients, averaged through each hook. The error is that of the result against the mean
# in float32; `after 16` is the error of the mean of 16 results in a row, for the same gradients.


# %% name="hooks"
HOOKS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "allreduce": (allreduce_hook, lambda: None),
    "fp16": (fp16_compress_hook, lambda: None),
    "bf16": (bf16_compress_hook, lambda: None),
    "PowerSGD 1": (powerSGD_hook, lambda: power_sgd(1)),
    "PowerSGD 8": (powerSGD_hook, lambda: power_sgd(8)),
    "noop": (noop_hook, lambda: None),
}
PLAIN_PASSES, PASSES = 2, 16


def power_sgd(rank: int) -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=PLAIN_PASSES)


def gradient(ddp: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ddp.zero_grad()
    ddp(**batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters()])


def try_hook(rank: int, name: str) -> tuple[float, float, float, bool]:
    """MiB in all-reduces, error of one pass and of the mean of all, and whether ranks agree."""
    batch, (hook, state) = batch_of(rank, pairs=1), HOOKS[name]
    mean = gradient(build(), batch) / dist.get_world_size()
    dist.all_reduce(mean)
    ddp = miniddp.DistributedDataParallel(build())
    ddp.register_comm_hook(state(), hook)
    for _ in range(PLAIN_PASSES):
        gradient(ddp, batch)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        first = gradient(ddp, batch)
    mib = sum(call.args[0].nbytes for call in all_reduce.call_args_list) / MIB
    total = first.clone()
    for _ in range(PASSES - 1):
        total += gradient(ddp, batch)
    other = first.clone()
    dist.broadcast(other, src=0)
    agree = torch.tensor(float(torch.equal(first, other)))
    dist.all_reduce(agree, dist.ReduceOp.MIN)
    return mib, distance(first, mean), distance(total / PASSES, mean), bool(agree)


def distance(value: Tensor, wanted: Tensor) -> float:
    return ((value - wanted).norm() / wanted.norm()).item()


def percent(error: float) -> str:
    return f"{100 * error:.2f}%"


def try_all_hooks(rank: int) -> dict[str, tuple[float, float, float, bool]]:
    return {name: try_hook(rank, name) for name in HOOKS}


tried = miniddp.run_ranks(try_all_hooks, 2, timeout=180)[0]
table(
    [
        [name, f"{mib:.2f}", percent(once), percent(average), "yes" if agree else "no"]
        for name, (mib, once, average, agree) in tried.items()
    ],
    ["hook", "MiB", "error", "after 16", "equal"],
    align="lrrrl",
)
full = tried["allreduce"]
for name in ("fp16", "bf16"):
    assert abs(tried[name][0] / full[0] - 0.5) < 1e-6, "half the bytes"
    assert full[1] < tried[name][1] < 1e-2
for rank in (1, 8):
    mib, once, average, agree = tried[f"PowerSGD {rank}"]
    assert agree
    assert mib < full[0] / 4
    assert average < 0.8 * once, "what one pass leaves out comes later"
assert tried["noop"][0] == 0
assert tried["noop"][1] > 0.1
assert not tried["noop"][3]
record(
    power_rank1_share=full[0] / tried["PowerSGD 1"][0],
    power_rank1_error=tried["PowerSGD 1"][1],
    power_rank1_average=tried["PowerSGD 1"][2],
    bf16_over_fp16=tried["bf16"][1] / tried["fp16"][1],
    hook_passes=PASSES,
)

# %% [markdown]
# ## On paper: what is left after backward
#
# 8 ms of backward, gradients of equal size in k buckets. `left` is the time after the end of
# backward for which the ranks still wait. Every bucket pays 0.1 ms of latency on top of its share.


# %% name="model"
BACKWARD, LATENCY = 8.0, 0.1
COUNTS = [1, 2, 4, 8, 16, 32, 64]


def left(communication: float, count: int) -> float:
    layers = even_layers([1] * count, forward=0, backward=BACKWARD)
    return simulate(layers, lambda _: communication / count + LATENCY).exposed


def left_by_formula(communication: float, count: int) -> float:
    one = communication / count + LATENCY
    return max(one, BACKWARD / count + count * one - BACKWARD)


table(
    [[count, *(f"{left(total, count):.2f}" for total in (4.0, 16.0))] for count in COUNTS],
    ["buckets", "left of 4 ms", "left of 16 ms"],
)
for total in (4.0, 16.0):
    for count in COUNTS:
        assert abs(left(total, count) - left_by_formula(total, count)) < 1e-9

# %% [markdown]
# ## How large a bucket
#
# Forward, backward and synchronisation of the language model, without an optimizer. Each round
# takes every variant once; the order rotates. The time is that of the slower rank.

# %% name="sweep"
CAPS = [0.25, 1, 4, 25]
NOOP_HOOKS = {"torch": debugging_hooks.noop_hook, "miniddp": noop_hook}
ROUNDS = 9 if device().type == "cpu" else 15


def variants() -> dict[str, nn.Module]:
    """Every way to synchronise, each with a model of its own."""
    found: dict[str, nn.Module] = {"simple": miniddp.SimpleDDP(build())}
    for cap in CAPS:
        found[f"torch {cap}"] = Torch(build(), bucket_cap_mb=cap)
        found[f"miniddp {cap}"] = miniddp.DistributedDataParallel(build(), bucket_cap_mb=cap)
    for kind, wrap in CLASSES.items():
        found[f"{kind} noop"] = wrap(build())
        found[f"{kind} noop"].register_comm_hook(None, NOOP_HOOKS[kind])
        found[f"{kind} unused"] = wrap(build(), find_unused_parameters=True, bucket_cap_mb=4)
    return found


def seconds_of_step(ddp: nn.Module, batch: dict[str, Tensor]) -> float:
    ddp.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    ddp(**batch).loss.backward()
    if isinstance(ddp, miniddp.SimpleDDP):
        ddp.sync_gradients()
    if device().type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(rank: int) -> dict[str, list[float]]:
    models, batch = variants(), batch_of(rank)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    warm_up = 2
    for number in range(warm_up + ROUNDS):
        order = list(models)[number % len(models) :] + list(models)[: number % len(models)]
        for name in order:
            took = seconds_of_step(models[name], batch)
            if number >= warm_up:
                seconds[name].append(took)
    return seconds


measured = miniddp.run_ranks(measure, 2, timeout=300)[0]


def ratio(name: str, reference: str) -> float:
    """The median over the rounds of one time over another of the same round."""
    pairs = zip(measured[name], measured[reference], strict=True)
    return statistics.median(a / b for a, b in pairs)


noop = ratio("torch noop", "simple")
fig, axes = plt.subplots()
axes.axhline(1, color=FOREGROUND, linestyle=":", label="SimpleDDP")
for kind, color, style, marker in (
    ("torch", RANK_COLORS[1], "--", "s"),
    ("miniddp", RANK_COLORS[0], "-", "o"),
):
    values = [ratio(f"{kind} {cap}", "simple") for cap in CAPS]
    axes.plot(CAPS, values, style, marker=marker, color=color, label=kind)
axes.axhline(noop, color=MUTED, linestyle="-.", label="torch, noop hook")
axes.set_xscale("log")
axes.set_xticks(CAPS, [f"{cap:g}" for cap in CAPS])
axes.minorticks_off()
axes.set(xlabel="bucket_cap_mb", ylabel="time per step, SimpleDDP = 1", ylim=(0, None))
axes.legend(ncols=2, loc="lower left")
figure(fig)

# %% name="sweep-values"
record(
    rounds=ROUNDS,
    noop_over_simple=noop,
    simple_over_noop=1 / noop,
    simple_over_4=ratio("simple", "miniddp 4"),
    miniddp_over_torch=ratio("miniddp 4", "torch 4"),
    unused_torch=ratio("torch unused", "torch 4"),
    unused_miniddp=ratio("miniddp unused", "miniddp 4"),
    exposed_miniddp=ratio("miniddp 4", "miniddp noop"),
    exposed_simple=ratio("simple", "miniddp noop"),
)

# %% name="sweep-table"
table(
    [
        [cap, f"{ratio(f'torch {cap}', 'simple'):.2f}", f"{ratio(f'miniddp {cap}', 'simple'):.2f}"]
        for cap in CAPS
    ],
    ["cap in MiB", "torch", "miniddp"],
)
