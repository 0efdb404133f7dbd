# %% [markdown]
# # Sync during backward
#
# Hooks average each gradient as soon as backward has it. This run shows when which hook is called,
# three hooks that look right and are not, what has been sent when backward ends, and what happens
# in float16, before backward, and with a parameter that not every rank uses.

# %% name="setup"
import runpy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import miniddp
from book import provenance, record, show_ranks, table
from instruments.failures import hang_of
from instruments.missing import step_with_simple_ddp, two_steps_with_torch
from instruments.origins import FEATURES, STEPS, backward, small_model, train_with
from instruments.programs import held_out_loss, run_torchrun, step_losses
from miniddp.launch import RankResults
from miniddp.process import device
from shakespeare import build_language_model

provenance(device=device(), world_size=2, backend="gloo")

# %% [markdown]
# ## When a hook is called, and with what
#
# One weight of 2, the loss 3 w, two backward passes without `zero_grad` between them.


# %% name="two-hooks"
weight = nn.Parameter(torch.tensor(2.0))
seen: list[tuple[float, float | None]] = []


def look(name: str, argument: Tensor) -> None:
    accumulated = None if weight.grad is None else weight.grad.item()
    seen.append((argument.item(), accumulated))
    print(f"{name:37} gets {argument.item():.0f}, .grad is {accumulated}")


weight.register_hook(lambda gradient: look("register_hook", gradient))
weight.register_post_accumulate_grad_hook(
    lambda parameter: look("register_post_accumulate_grad_hook", parameter)
)
for _ in range(2):
    (3 * weight).backward()
assert seen == [(3, None), (2, 3), (3, 3), (2, 6)]

# %% name="ready-order"
model = small_model()
order: list[str] = []
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
backward(model, [torch.randn(4, FEATURES, device=device())])
assert order == [name for name, _ in model.named_parameters()][::-1]
print("ready:", ", ".join(order))

# %% [markdown]
# ## Is each gradient the mean?
#
# A small model takes three steps with somebody's way to synchronise. In each step its gradients are
# compared with those that this rank computes without any synchronisation, and with their mean over
# the ranks. At the end the replicas are compared.


# %% name="harness"
def show(found: RankResults, origin: str, replicas: str) -> None:
    """All gradients of all steps have this origin, and the replicas are this at the end."""
    assert {kind for steps in found for origins in steps for kind in origins.values()} == {origin}
    assert all(f"replicas at the end: {replicas}" in text for text in found.outputs)
    show_ranks(found)


# %% [markdown]
# ## Three hooks that look right
#
# Each of these runs without an error.
#
# ### The hook that gets the parameter
#
# `register_post_accumulate_grad_hook` calls the hook with the *parameter*. The gradients stay as
# they were.


# %% name="bug-parameter"
def reduce_the_argument(model: nn.Module) -> None:
    def hook(gradient: Tensor) -> None:
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


show(miniddp.run_ranks(train_with, 2, reduce_the_argument), "own gradient", "different")


# %% name="fix-parameter"
def reduce_the_gradient(model: nn.Module) -> None:
    def hook(parameter: Tensor) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


show(miniddp.run_ranks(train_with, 2, reduce_the_gradient), "mean of the ranks", "equal")

# %% [markdown]
# ### The hook that sees one micro-batch
#
# `Tensor.register_hook` gets the gradient of *this* backward pass, before it is added to `.grad`.
# Synchronising in the last micro-batch only leaves the earlier ones local.


# %% name="bug-accumulation"
MICRO_BATCHES = 2


def reduce_the_last(model: nn.Module) -> None:
    calls = dict.fromkeys(model.parameters(), 0)

    def hook_of(parameter: Tensor) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            calls[parameter] += 1
            if calls[parameter] % MICRO_BATCHES:
                return gradient
            mean = gradient / dist.get_world_size()
            dist.all_reduce(mean)
            return mean

        return hook

    for parameter in model.parameters():
        parameter.register_hook(hook_of(parameter))


accumulated = miniddp.run_ranks(train_with, 2, reduce_the_last, MICRO_BATCHES)
show(accumulated, "neither own nor mean", "different")

# %% [markdown]
# The other kind of hook sees all that has accumulated.


# %% name="fix-counter"
def reduce_each_sum(model: nn.Module) -> None:
    calls = dict.fromkeys(model.parameters(), 0)

    def hook(parameter: Tensor) -> None:
        calls[parameter] += 1
        if calls[parameter] % MICRO_BATCHES == 0:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


all_of_it = miniddp.run_ranks(train_with, 2, reduce_each_sum, MICRO_BATCHES)
show(all_of_it, "mean of the ranks", "equal")

# %% [markdown]
# ## What has been sent when backward ends
#
# Stage 6 starts an all-reduce for each gradient that is ready, and goes on with backward. How many
# of them are done when backward is?


# %% name="overlap"
def sent_during_backward(rank: int) -> tuple[int, int]:
    torch.set_num_threads(1)
    miniddp.set_seed(0)
    model = build_language_model().to(device())
    under_way = runpy.run_path("stages/6_hooks.py")["average_during_backward"](model)
    tokens = torch.randint(1024, (16, 65), device=device())
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        started = len(under_way)
        done = sum(work.is_completed() for work in under_way)
        while under_way:
            under_way.pop().wait()
    return started, done


sent = miniddp.run_ranks(sent_during_backward, 2)
started, _ = sent[0]
done = min(done for _, done in sent)
assert 0 < done <= started
record(started=started, done=done, steps=STEPS)

# %% [markdown]
# The losses of stage 6 beside those of stage 5, two ranks each.

# %% name="stages"
losses = {}
for file in ("5_ring.py", "6_hooks.py"):
    printed = run_torchrun(2, f"stages/{file}", STEPS="60")
    losses[file] = [*step_losses(printed).values(), held_out_loss(printed)]
before, after = losses.values()
assert all(abs(one - other) < 0.01 for one, other in zip(before, after, strict=True))
rows = [[f"`{file}`", *(f"{loss:.4f}" for loss in found)] for file, found in losses.items()]
table(rows, ["stage", "step 20", "40", "60", "held out"], "lrrrr")

# %% [markdown]
# ## Divide, then add
#
# float16 ends at 65,504. The same two gradients on two ranks, averaged in both orders.


# %% name="float16"
LARGE, SMALL = 40_000, 2**-24  # 2**-24 is the smallest float16 above zero


def average_float16(rank: int, value: float) -> tuple[float, float]:
    sum_first = torch.tensor(value, dtype=torch.float16, device=device())
    divide_first = sum_first.clone()
    dist.all_reduce(sum_first)
    sum_first /= dist.get_world_size()
    divide_first /= dist.get_world_size()
    dist.all_reduce(divide_first)
    return sum_first.item(), divide_first.item()


averages = {value: miniddp.run_ranks(average_float16, 2, value)[0] for value in (LARGE, SMALL)}
assert averages[LARGE] == (float("inf"), LARGE)
assert averages[SMALL] == (SMALL, 0)


def short(value: float) -> str:
    return f"{value:,.0f}" if value > 1 else f"{value:.2g}"


table(
    [[short(value), *map(short, averages[value])] for value in averages],
    ["gradient on both ranks", "add, then divide", "divide, then add"],
    align="rrr",
)

# %% [markdown]
# ## After backward, not before


# %% name="too-early"
def synchronise_before_backward(model: nn.Module) -> None:
    ddp = miniddp.SimpleDDP(model)
    model.register_forward_pre_hook(lambda *_: ddp.sync_gradients())


too_early = miniddp.run_ranks(train_with, 2, synchronise_before_backward)
show(too_early, "own gradient", "different")

# %% [markdown]
# ## A parameter that not every rank uses
#
# Two heads on one body. In the first case rank 0 uses the left head and rank 1 the right one.

# %% name="missing-simple"
missed = miniddp.run_ranks(step_with_simple_ddp, 2, [["left"], ["right"]])
assert all("'left.weight' has a gradient on 1 of 2 ranks" in error for error in missed)
show_ranks(missed)

# %% name="missing-torch"
both_miss = miniddp.run_ranks(two_steps_with_torch, 2, [["left"], ["right"]])
assert both_miss[0] != both_miss[1], "the gradients were not synchronised"
for text in both_miss.outputs:
    assert "step 0: backward passes" in text
    assert "step 1: RuntimeError: Expected to have finished reduction" in " ".join(text.split())
show_ranks(both_miss)

# %% [markdown]
# In the second case rank 0 uses both heads and rank 1 the left one only. Rank 0 has every gradient
# that it waits for, starts its all-reduce, and waits for rank 1, which never starts one.


# %% name="missing-one-side"
hang = hang_of(two_steps_with_torch, 2, [["left", "right"], ["left"]], timeout=20)
assert "in backward" in hang.stacks[0]
assert "backward passes" not in hang.outputs[0]
assert "step 1: RuntimeError: Expected to" in " ".join(hang.outputs[1].split())
show_ranks([hang.outputs[0] + "… and waits in backward", hang.outputs[1]])

# %% [markdown]
# ## A bucket that is never full
#
# Gradients wait until four of them are there. The last two of a backward pass never fill a bucket:
# those of the *first* layer.


# %% name="never-full"
BUCKET = 4


def send_full_buckets(model: nn.Module) -> None:
    waiting: list[Tensor] = []

    def hook(parameter: Tensor) -> None:
        waiting.append(parameter)
        if len(waiting) == BUCKET:
            average(waiting)
            waiting.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def average(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


never_full = miniddp.run_ranks(train_with, 2, send_full_buckets)
for origins in never_full:
    assert [list(found.values()).count("own gradient") for found in origins] == [2, 0, 2]
assert all("different" in text for text in never_full.outputs)
show_ranks(never_full)
