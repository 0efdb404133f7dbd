# %% [markdown]
# # Buckets and overlap
#
# Gradients of the stages' language model travel in buckets, while backward still computes the rest.
# This run records one such backward pass, averages by hand and compares, counts when each bucket
# can leave, watches PyTorch and miniddp change their buckets after the first pass, measures memory
# and what each communication hook sends, and shows what an order that differs between ranks does.

# %% name="setup"
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import miniddp
from book import provenance, record, show_ranks, table, timeline
from finetune.model import build_model
from instruments.timeline import Timeline
from miniddp.bucket import MIB, plan_buckets
from miniddp.hooks import (
    PowerSGDState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    powerSGD_hook,
)
from miniddp.process import device
from shakespeare import build_language_model, load_text

provenance(device=device(), world_size=2, backend="gloo")
warnings.filterwarnings("ignore")
sequences, _ = load_text()

Torch = nn.parallel.DistributedDataParallel
CLASSES = {"torch": Torch, "miniddp": miniddp.DistributedDataParallel}


def build() -> nn.Module:
    miniddp.set_seed(0)
    return build_language_model().to(device())


def batch_of(rank: int, count: int = 18) -> dict[str, Tensor]:
    """Half of a batch of the stages, as two ranks share it."""
    part = sequences[rank * count : (rank + 1) * count].to(device())
    return {"input_ids": part, "labels": part}


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
TIMELINE_CAP = 0.75


def one_pass(rank: int) -> tuple[str, list[list[str]]]:
    ddp = miniddp.DistributedDataParallel(build(), bucket_cap_mb=TIMELINE_CAP)
    batch = batch_of(rank)
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
# The three buckets of the chapter's picture: three layers, 6,928 bytes of gradients, and caps of
# 512 bytes for the first bucket, 4,096 for the others.


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
# ## By hand
#
# The flat message and the hooks in one function, and how far its gradients are from the mean of
# both ranks' own. The two classes do the same.


# %% name="by-hand"
Plan = Sequence[Sequence[int]]


def average_in_buckets(model: nn.Module, plan: Plan) -> Callable[[], None]:
    """One message for each bucket of the plan; what to call after backward."""
    parameters = list(model.parameters())
    buckets = [[parameters[i] for i in indices] for indices in plan]
    missing = [set(bucket) for bucket in buckets]
    under_way: list[tuple[Tensor, dist.Work]] = []

    def ready(parameter: Tensor) -> None:
        for bucket in missing:
            bucket.discard(parameter)
        while len(under_way) < len(buckets) and not missing[len(under_way)]:
            send(buckets[len(under_way)])

    def send(bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        flat /= dist.get_world_size()
        under_way.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish() -> None:
        for bucket, (flat, work) in zip(buckets, under_way, strict=True):
            work.wait()
            means = flat.split([parameter.numel() for parameter in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        missing[:] = [set(bucket) for bucket in buckets]
        under_way.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready)
    return finish


# %% name="by-hand-check"
def gradients_of(model: nn.Module, rank: int, finish: Callable[[], None] | None = None) -> Tensor:
    for _ in range(2):  # the second pass has other buckets in both classes
        model.zero_grad()
        model(**batch_of(rank)).loss.backward()
        if finish:
            finish()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def compare_gradients(rank: int) -> dict[str, float]:
    cap = int(TIMELINE_CAP * MIB)
    plan = plan_buckets(num_bytes, [0] * len(names), range(len(names))[::-1], cap, cap)
    by_hand = build()
    found = {
        "nobody averages": gradients_of(build(), rank),
        "by hand": gradients_of(by_hand, rank, average_in_buckets(by_hand, plan)),
        **{kind: gradients_of(wrap(build()), rank) for kind, wrap in CLASSES.items()},
    }
    mean = found["nobody averages"] / dist.get_world_size()
    dist.all_reduce(mean)
    return {kind: distance(found[kind], mean) for kind in found}


def distance(value: Tensor, wanted: Tensor) -> float:
    return ((value - wanted).norm() / wanted.norm()).item()


differences = miniddp.run_ranks(compare_gradients, 2, timeout=120)
for own, *averaged in (values.values() for values in differences):
    assert own > 0.1
    assert max(averaged) < 1e-5
table(
    [[kind, *(f"{values[kind]:.1g}" for values in differences)] for kind in differences[0]],
    ["gradients", "rank 0", "rank 1"],
    align="lrr",
)

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
    model(**batch_of(0, count=1)).loss.backward()
    return order


def leaves_after(plan: Sequence[Sequence[int]], ready: Sequence[int]) -> list[int]:
    """For each bucket, how many gradients backward has produced when it can be sent."""
    moment = {i: number for number, i in enumerate(ready, 1)}
    return list(accumulate((max(moment[i] for i in bucket) for bucket in plan), max))


ready = ready_order(build())
cap = int(TIMELINE_CAP * MIB)
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
    [[name, " · ".join(map(str, numbers))] for name, numbers in leaves.items()],
    ["parameters in this order", f"sent after … of {len(names)} gradients"],
    align="lr",
)
shown = [[names[i] for i in bucket] for bucket in plans["as they become ready"]]
assert shown == passes[0][1], "the buckets of the timeline"
assert leaves["as they become ready"][0] < len(names) / 3
assert set(leaves["the model's own"]) == {len(names)}, "nothing leaves before the end of backward"
record(first_leaves_after=leaves["as they become ready"][0])


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
# Two models: eight layers that the module lists from the last to the first, so that `reversed`
# makes of them the order in which *forward* uses them; and a language model of 25 million
# parameters with the default caps, 1 MiB for the first bucket, then 25 MiB.


# %% name="first-pass"
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


def large() -> nn.Module:
    miniddp.set_seed(0)
    return build_model("25m").to(device())


def square(ddp: nn.Module) -> Tensor:
    return ddp(torch.ones(2, 256, device=device())).square().mean()


def loss_of_large(ddp: nn.Module) -> Tensor:
    tokens = torch.arange(64, device=device()).view(2, 32)
    return ddp(input_ids=tokens, labels=tokens[:, 0] * 0).loss


def places(sent: Iterable[tuple[int, int]]) -> str:
    return " ".join(str(gradients) for _, gradients in sent)


def first_passes(rank: int) -> dict[tuple[str, str], list[list[tuple[int, int]]]]:
    found = {}
    for kind in CLASSES:
        found["8 layers, listed in reverse", kind] = watch_steps(
            rank, listed_backwards, square, 3, kind, bucket_cap_mb=0.5
        )
        found["25 M parameters, default caps", kind] = watch_steps(
            rank, large, loss_of_large, 3, kind
        )
    return found


passes_of = miniddp.run_ranks(first_passes, 2, timeout=180)[0]
lines = [
    [name, number, " ".join(f"{size / MIB:.1f}" for size, _ in sent), places(sent)]
    for (name, kind), steps in passes_of.items()
    for number, sent in zip(("1", "2, 3"), steps, strict=False)
    if kind == "torch"
]
table(lines, ["model", "pass", "buckets in MiB", "sent after … gradients"], align="lrll")
for (name, _), steps in passes_of.items():
    assert steps == passes_of[name, "torch"], "miniddp: the same buckets at the same moments"
    assert len(steps[0]) == 1, "one bucket, sent at the end"
    assert steps[1] == steps[2] != steps[0]
reverse, defaults = (steps for (_, kind), steps in passes_of.items() if kind == "torch")
assert places(reverse[1]) == "2 4 6 8"
record(
    large_mib=defaults[0][0][0] / MIB,
    first_bucket_mib=defaults[1][0][0] / MIB,
    second_bucket_mib=defaults[1][1][0] / MIB,
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
        ddp(**batch_of(rank, count=1)).loss.backward()
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
    batch, (hook, state) = batch_of(rank, count=1), HOOKS[name]
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


def percent(error: float) -> str:
    return f"{100 * error:.2f}%"


def try_all_hooks(rank: int) -> dict[str, tuple[float, float, float, bool]]:
    return {name: try_hook(rank, name) for name in HOOKS}


tried = miniddp.run_ranks(try_all_hooks, 2, timeout=180)[0]
table(
    [
        [name, f"{mib:.3g}", percent(once), percent(average), "yes" if agree else "no"]
        for name, (mib, once, average, agree) in tried.items()
    ],
    ["hook", "MiB", "error", "mean of 16", "equal"],
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
