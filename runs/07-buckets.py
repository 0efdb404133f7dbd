# %% [markdown]
# # Buckets and overlap
#
# Gradients of the stages' language model travel in buckets, while backward still computes the rest.
# This run records one such backward pass, averages by hand and compares, counts when each bucket
# can leave, watches PyTorch and miniddp change their buckets after the first pass, measures memory
# and what each communication hook sends, and shows what an order that differs between ranks does.

# %% name="setup"
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import miniddp
from book import provenance, record, show_ranks, table, timeline
from finetune.model import build_model
from instruments import awkward_models, bucket_probe, hook_error
from instruments.backend import backend_of
from instruments.gradients import flat_gradient, relative_error
from instruments.replicas import mean_over_ranks
from instruments.timeline import Timeline
from miniddp.bucket import MIB, plan_buckets
from miniddp.process import device
from own_ddp import DataParallel, average_in_buckets
from shakespeare import build_language_model, load_text

BACKEND = backend_of(2)
provenance(device=device(), world_size=2, backend=BACKEND)
warnings.filterwarnings("ignore")
sequences, _ = load_text()
CLASSES = {
    "torch": nn.parallel.DistributedDataParallel,
    "miniddp": miniddp.DistributedDataParallel,
}


def build() -> nn.Module:
    miniddp.set_seed(0)
    return build_language_model().to(device())


def loss_on(rank: int, count: int = 18) -> Callable[[nn.Module], Tensor]:
    """The loss on half of a batch of the stages, as two ranks share it."""
    part = sequences[rank * count : (rank + 1) * count].to(device())
    return lambda model: model(input_ids=part, labels=part).loss


model = build()
names = [name for name, _ in model.named_parameters()]
num_bytes = [parameter.nbytes for parameter in model.parameters()]
record(
    parameters=len(names),
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
    loss_of = loss_on(rank)
    recorder = Timeline(ddp)
    for _ in range(4):
        ddp.zero_grad()
        loss = loss_of(ddp)
        recorder.note("backward")
        loss.backward()
        recorder.note("end")
    return recorder.to_json(), [[names[i] for i in b.indices] for b in ddp.reducer.buckets]


passes = miniddp.run_ranks(one_pass, 2, backend=BACKEND, timeout=120)
assert passes[0][1] == passes[1][1], "the same buckets on every rank"
timeline([recording for recording, _ in passes], parameters=passes[0][1])
record(timeline_cap=TIMELINE_CAP)

# %% [markdown]
# ## By hand
#
# The flat message and the hooks in one function, `average_in_buckets` of `own_ddp.py`, and how far
# its gradients are from the mean of both ranks' own. The two classes do the same.


# %% name="by-hand-check"
def gradients_of(model: nn.Module, rank: int, finish: Callable[[], None] | None = None) -> Tensor:
    for _ in range(2):  # the second pass has other buckets in both classes
        model.zero_grad()
        loss_on(rank)(model).backward()
        if finish:
            finish()
    return flat_gradient(model)


def compare_gradients(rank: int) -> dict[str, float]:
    cap = int(TIMELINE_CAP * MIB)
    plan = plan_buckets(num_bytes, [0] * len(names), range(len(names))[::-1], cap, cap)
    by_hand = build()
    found = {
        "nobody averages": gradients_of(build(), rank),
        "by hand": gradients_of(by_hand, rank, average_in_buckets(by_hand, plan)),
        **{kind: gradients_of(wrap(build()), rank) for kind, wrap in CLASSES.items()},
    }
    mean = mean_over_ranks(found["nobody averages"])
    return {kind: relative_error(found[kind], mean) for kind in found}


differences = miniddp.run_ranks(compare_gradients, 2, backend=BACKEND, timeout=120)
for local, *averaged in (values.values() for values in differences):
    assert local > 0.1
    assert max(averaged) < 1e-5
table(
    [[kind, *(f"{values[kind]:.1g}" for values in differences)] for kind in differences[0]],
    ["gradients", "rank 0", "rank 1"],
    align="lrr",
)

# %% [markdown]
# ## As a class
#
# The class of `own_ddp.py` beside PyTorch's: a few steps of a small model that begins with other
# weights on each rank. How far apart are the weights at the end, and are the replicas equal?


# %% name="own-class"
def train_both(rank: int) -> float:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(
        device()
    )
    ours = DataParallel(deepcopy(net), plan=[[5, 4], [3, 2], [1, 0]])
    torchs = nn.parallel.DistributedDataParallel(net)
    for _ in range(5):
        inputs = torch.randn(4, 8, device=device())
        for wrapper in (ours, torchs):
            wrapper.zero_grad()
            wrapper(inputs).square().mean().backward()
            with torch.no_grad():
                for parameter in wrapper.parameters():
                    parameter -= 0.1 * parameter.grad
    miniddp.verify_replicas(ours.module)
    return max(
        float((one - other).abs().max())
        for one, other in zip(ours.parameters(), torchs.parameters(), strict=True)
    )


apart = max(miniddp.run_ranks(train_both, 2, backend=BACKEND, timeout=120))
assert apart == 0, "the bits of PyTorch's"

# %% [markdown]
# ## In which order
#
# Hooks note in which order backward produces the gradients of the language model. The same cap,
# with the parameters in this order, from last to first, and in the model's own order: after how
# many gradients can each bucket leave? Each waits for the buckets before it.

# %% name="order"
ready = bucket_probe.ready_order(build(), loss_on(0, count=1))
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
leaves = {name: bucket_probe.leaves_after(plan, ready) for name, plan in plans.items()}
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
# there are by then. Two models: eight layers that the module lists from the last to the first, so
# that `reversed` makes of them the order in which *forward* uses them; and a language model of 25
# million parameters with the default caps, 1 MiB for the first bucket, then 25 MiB.


# %% name="first-pass"
Departures = list[bucket_probe.Departure]


def show_moments(departures: Departures) -> str:
    """After how many gradients each bucket left."""
    return " ".join(str(departure.gradients) for departure in departures)


def show_sizes(departures: Departures) -> str:
    return " ".join(f"{departure.num_bytes / MIB:.1f}" for departure in departures)


def large() -> nn.Module:
    miniddp.set_seed(0)
    return build_model("25m").to(device())


def loss_of_large(ddp: nn.Module) -> Tensor:
    tokens = torch.arange(64, device=device()).view(2, 32)
    return ddp(input_ids=tokens, labels=tokens[:, 0] * 0).loss


def first_passes(rank: int) -> dict[tuple[str, str], list[Departures]]:
    found = {}
    for kind, wrap in CLASSES.items():
        small_cap = partial(wrap, bucket_cap_mb=0.5)
        found["8 layers, listed in reverse", kind] = bucket_probe.departures_by_step(
            awkward_models.listed_backwards(), small_cap, awkward_models.loss_of, 3
        )
        found["25 M parameters, default caps", kind] = bucket_probe.departures_by_step(
            large(), wrap, loss_of_large, 3
        )
    return found


passes_of = miniddp.run_ranks(first_passes, 2, backend=BACKEND, timeout=180)[0]
lines = [
    [name, number, show_sizes(departures), show_moments(departures)]
    for (name, kind), steps in passes_of.items()
    for number, departures in zip(("1", "2, 3"), steps, strict=False)
    if kind == "torch"
]
table(lines, ["model", "pass", "buckets in MiB", "sent after … gradients"], align="lrll")
for (name, _), steps in passes_of.items():
    assert steps == passes_of[name, "torch"], "miniddp: the same buckets at the same moments"
    assert len(steps[0]) == 1, "one bucket, sent at the end"
    assert steps[1] == steps[2] != steps[0]
reverse, defaults = (steps for (_, kind), steps in passes_of.items() if kind == "torch")
assert show_moments(reverse[1]) == "2 4 6 8"
record(large_mib=defaults[0][0].num_bytes / MIB)

# %% [markdown]
# ## Gradients as views
#
# The bytes behind all gradients and all buckets, each piece of memory counted once.


# %% name="views"
def memory(rank: int) -> dict[tuple[str, bool], float]:
    """MiB of the gradients and of the buckets they travel in, by class and views."""
    found = {}
    for kind, wrap in CLASSES.items():
        for view in (False, True):
            ddp = wrap(build(), gradient_as_bucket_view=view, bucket_cap_mb=TIMELINE_CAP)
            found[kind, view] = bucket_probe.bytes_held(ddp, loss_on(rank, count=1)) / MIB
    return found


found = miniddp.run_ranks(memory, 2, backend=BACKEND, timeout=120)[0]
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


mixed = miniddp.run_ranks(send_in_own_order, 2, backend=BACKEND)
assert list(mixed) == [{"a": 150.5, "b": 51.5}, {"a": 51.5, "b": 150.5}]
show_ranks(mixed)

# %% [markdown]
# ## A parameter that is not used
#
# A body of six layers, and two heads that come last in the model. The loss uses the left head only.
# When does a class notice that the right head got no gradient, and does its error name the
# parameter?


# %% name="noticed"
def all_notice(rank: int) -> dict[str, awkward_models.Notice]:
    wrappers = {
        **CLASSES,
        "miniddp, `check_reduction=True`": partial(CLASSES["miniddp"], check_reduction=True),
    }
    return {
        name: awkward_models.notice(wrap(awkward_models.two_heads(frozen=False)))
        for name, wrap in wrappers.items()
    }


noticed = miniddp.run_ranks(all_notice, 2, backend=BACKEND)
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
PASSES = 16


def try_hooks(rank: int) -> dict[str, hook_error.Trial]:
    return hook_error.try_hooks(build, loss_on(rank, count=1), PASSES)


def percent(error: float) -> str:
    return f"{100 * error:.2f}%"


tried = miniddp.run_ranks(try_hooks, 2, backend=BACKEND, timeout=180)[0]
rows = []
for name, trial in tried.items():
    sent = f"{trial.num_bytes / MIB:.3g}"
    errors = [percent(trial.once), percent(trial.in_mean)]
    rows.append([name, sent, *errors, "yes" if trial.equal else "no"])
table(rows, ["hook", "MiB", "error", "mean of 16", "equal"], align="lrrrl")
full = tried["allreduce"]
for name in ("fp16", "bf16"):
    assert abs(tried[name].num_bytes / full.num_bytes - 0.5) < 1e-6, "half the bytes"
    assert full.once < tried[name].once < 1e-2
for name in ("PowerSGD 1", "PowerSGD 8"):
    assert tried[name].equal
    assert tried[name].num_bytes < full.num_bytes / 4
    assert tried[name].in_mean < 0.8 * tried[name].once, "what one pass leaves out comes later"
assert tried["noop"].num_bytes == 0
assert tried["noop"].once > 0.1
assert not tried["noop"].equal
record(
    power_rank1_share=full.num_bytes / tried["PowerSGD 1"].num_bytes,
    hook_passes=PASSES,
)
