# %% [markdown]
# # Why averaging works
#
# Six samples and one weight, first. Then a small classifier that one process and 2, 3 and 4 ranks
# train on the same samples: are the gradients the same, and the weights? Then six cases in which
# the mean of the ranks is not the gradient of the joined batch, and what mends each of them.

# %% name="setup"
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Adam, Optimizer

import miniddp
from book import FOREGROUND, MUTED, data_dir, figure, provenance, record, show_ranks, table
from miniddp.accumulation import mean_weights
from miniddp.data import encode, load_mrpc
from miniddp.model import load_tokenizer
from miniddp.process import device

WORLD_SIZES = [2, 3, 4]
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")

# %% [markdown]
# ## Six samples, one weight
#
# The prediction is `w * x`, the loss half the squared error, and w = 1 at the start.

# %% name="paper"
SIX_SAMPLES = [(4, 2), (2, 1), (5, 4), (1, -4), (1, 0), (3, 2)]


def gradient_of(samples: Sequence[tuple[int, int]]) -> Tensor:
    weight = torch.ones((), requires_grad=True)
    losses = [(weight * x - y) ** 2 / 2 for x, y in samples]
    (sum(losses) / len(samples)).backward()
    return weight.grad


def share(rank: int, world_size: int) -> float:
    size = len(SIX_SAMPLES) // world_size
    gradient = gradient_of(SIX_SAMPLES[rank * size : (rank + 1) * size])
    print(f"own gradient:  {gradient:.0f}")
    gradient /= world_size
    dist.all_reduce(gradient)
    print(f"mean gradient: {gradient:.0f}")
    print(f"new weight:    {1 - 0.1 * gradient:.1f}")
    return gradient.item()


assert [gradient_of([sample]).item() for sample in SIX_SAMPLES] == [8, 2, 5, 5, 1, 3]
assert gradient_of(SIX_SAMPLES) == 4
for world_size, own in ((2, [5, 3]), (3, [5, 5, 2])):
    shared = miniddp.run_ranks(share, world_size, world_size)
    assert [int(text.split()[2]) for text in shared.outputs] == own
    assert all(abs(gradient - 4) < 1e-6 for gradient in shared)
    show_ranks(shared, title=f"{world_size} ranks")
print(f"one process: gradient {gradient_of(SIX_SAMPLES):.0f}")

# %% [markdown]
# ## The same training, alone and on ranks
#
# A small classifier of random points. Each step has a new batch, and every process makes the same
# one from the step's number.

# %% name="model"
SAMPLES, FEATURES, CLASSES, STEPS = 24, 16, 4, 20
NewOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, NewOptimizer] = {"SGD": partial(SGD, lr=0.2), "Adam": partial(Adam, lr=0.01)}


def build(dtype: torch.dtype = torch.float64, middle: nn.Module | None = None) -> nn.Module:
    miniddp.set_seed(0)
    first, last = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)
    return nn.Sequential(first, middle or nn.Identity(), nn.Tanh(), last).to(device(), dtype)


def batch_of(step: int, dtype: torch.dtype = torch.float64, samples: int = SAMPLES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    labels = inputs[:, :CLASSES].argmax(dim=1)
    return [inputs.to(device(), dtype), labels.to(device())]


class Snapshot(NamedTuple):
    """After one step, on the CPU: the gradient it used and the weights it led to."""

    gradient: Tensor
    weights: Tensor


def snapshot(model: nn.Module) -> Snapshot:
    return Snapshot(flat_gradient(model), parameters_to_vector(model.parameters()).detach().cpu())


def flat_gradient(model: nn.Module) -> Tensor:
    return parameters_to_vector([parameter.grad for parameter in model.parameters()]).cpu()


# %% name="train"
def train_alone(new_optimizer: NewOptimizer, dtype: torch.dtype) -> list[Snapshot]:
    model = build(dtype)
    optimizer = new_optimizer(model.parameters())
    history = []
    for step in range(STEPS):
        inputs, labels = batch_of(step, dtype)
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        history.append(snapshot(model))
        optimizer.zero_grad()
    return history


def train_on_rank(
    rank: int,
    world_size: int,
    new_optimizer: NewOptimizer,
    dtype: torch.dtype,
    wrap: Callable[[nn.Module], nn.Module] = miniddp.SimpleDDP,
) -> list[Snapshot]:
    model = wrap(build(dtype))
    optimizer = new_optimizer(model.parameters())
    history = []
    for step in range(STEPS):
        batch = batch_of(step, dtype)
        inputs, labels = (tensor.chunk(world_size)[rank] for tensor in batch)
        cross_entropy(model(inputs), labels).backward()
        model.sync_gradients()
        optimizer.step()
        history.append(snapshot(model))
        optimizer.zero_grad()
    return history


# %% [markdown]
# The largest difference of any element from the one process's: of the gradient in the first step,
# and of the weights after the last.

# %% name="parity"
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13}


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def train_all(rank: int, world_size: int) -> dict[tuple, list[Snapshot]]:
    return {
        (name, dtype): train_on_rank(rank, world_size, new_optimizer, dtype)
        for name, new_optimizer in OPTIMIZERS.items()
        for dtype in TOLERANCES
    }


alone = {
    (name, dtype): train_alone(new_optimizer, dtype)
    for name, new_optimizer in OPTIMIZERS.items()
    for dtype in TOLERANCES
}
gaps: dict[tuple, list[float]] = {}
gradient_gaps: dict[tuple, float] = {}
for world_size in WORLD_SIZES:
    ranks = miniddp.run_ranks(train_all, world_size, world_size)
    for (optimizer, dtype), expected in alone.items():
        found = ranks[0][optimizer, dtype]
        for other in ranks[1:]:
            same = zip(found, other[optimizer, dtype], strict=True)
            assert all(torch.equal(a.weights, b.weights) for a, b in same), "ranks stay equal"
        gradient = largest_difference(found[0].gradient, expected[0].gradient)
        weights = [
            largest_difference(a.weights, b.weights) for a, b in zip(found, expected, strict=True)
        ]
        assert largest_difference(expected[-1].weights, expected[0].weights) > 0.05, "it trains"
        assert gradient < TOLERANCES[dtype]
        assert max(weights) < TOLERANCES[dtype]
        gaps[world_size, optimizer, dtype] = weights
        gradient_gaps[world_size, dtype] = gradient  # the first step has no optimizer in it yet

rows = []
for world_size in WORLD_SIZES:
    first = [f"{gradient_gaps[world_size, dtype]:.0e}" for dtype in TOLERANCES]
    rows.append([world_size, "gradient", *first])
    for optimizer in OPTIMIZERS:
        last = [f"{gaps[world_size, optimizer, dtype][-1]:.0e}" for dtype in TOLERANCES]
        rows.append([world_size, f"weights, {optimizer}", *last])
table(rows, ["ranks", "of what", "float32", "float64"], "rlrr")

# %% [markdown]
# PyTorch's own class, which synchronises during backward, on three ranks:


# %% name="parity-values"
class TorchDDP(DistributedDataParallel):
    def sync_gradients(self) -> None:
        """Done in backward."""


adam_in_float64 = OPTIMIZERS["Adam"], torch.float64
torch_ranks = miniddp.run_ranks(partial(train_on_rank, wrap=TorchDDP), 3, 3, *adam_in_float64)
torch_gap = largest_difference(torch_ranks[0][-1].weights, alone["Adam", torch.float64][-1].weights)
assert torch_gap < TOLERANCES[torch.float64]
worst = {dtype: max(max(gaps[key]) for key in gaps if key[2] is dtype) for dtype in TOLERANCES}
largest = max(history[0].gradient.abs().max().item() for history in alone.values())
record(
    samples=SAMPLES,
    steps=STEPS,
    parameters=alone["SGD", torch.float64][0].weights.numel(),
    worst_float32=worst[torch.float32],
    worst_float64=worst[torch.float64],
    shrinks=worst[torch.float32] / worst[torch.float64],
    largest_gradient=largest,
    torch_float64=torch_gap,
)
assert worst[torch.float64] * 1e4 < worst[torch.float32]

# %% [markdown]
# ## Rounding, and a mistake
#
# The same three numbers, added in two orders.

# %% name="order"
left, right = (0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3)
print("(0.1 + 0.2) + 0.3 =", left)
print("0.1 + (0.2 + 0.3) =", right)
assert left != right

# %% [markdown]
# The gap between three ranks and one process over the training, in both dtypes. For contrast a
# mistake: three ranks that add their gradients and do not divide.


# %% name="gap"
class SumOfRanks(miniddp.SimpleDDP):
    def sync_gradients(self) -> None:
        super().sync_gradients()
        for parameter in self.parameters():
            parameter.grad *= dist.get_world_size()


def train_without_dividing(rank: int) -> dict[tuple, list[Snapshot]]:
    return {
        (name, dtype): train_on_rank(rank, 3, new_optimizer, dtype, wrap=SumOfRanks)
        for name, new_optimizer in OPTIMIZERS.items()
        for dtype in TOLERANCES
    }


undivided = miniddp.run_ranks(train_without_dividing, 3)[0]
fig, axes = plt.subplots()
for dtype, line in ((torch.float32, "-"), (torch.float64, "--")):
    reference = zip(undivided["SGD", dtype], alone["SGD", dtype], strict=True)
    wrong = [largest_difference(a.weights, b.weights) for a, b in reference]
    assert min(wrong) > 1e-3, "a mistake does not shrink with the precision"
    steps = range(1, STEPS + 1)
    axes.semilogy(steps, wrong, line, marker="x", color=MUTED)
    axes.semilogy(steps, gaps[3, "SGD", dtype], line, marker="o", color=FOREGROUND)
    name = str(dtype).removeprefix("torch.")
    axes.text(STEPS, 30 * max(gaps[3, "SGD", dtype]), f"mean, {name}", ha="right")
axes.text(STEPS, 8e-3, "not divided, either dtype", ha="right")
axes.set(xlabel="step", ylabel="largest difference of a weight", xticks=range(0, STEPS + 1, 5))
figure(fig)

# %% name="gap-values"
without = {
    name: largest_difference(
        undivided[name, torch.float64][-1].weights, alone[name, torch.float64][-1].weights
    )
    for name in OPTIMIZERS
}
assert without["Adam"] * 100 < without["SGD"], "Adam's step does not depend on the scale"
record(undivided_sgd=without["SGD"], undivided_adam=without["Adam"])

# %% [markdown]
# ## When the mean is something else
#
# From here on everything is in float64, so that what is not rounding stands out. The error is the
# length of the difference between the averaged gradient and that of the joined batch, divided by
# the length of the latter.


# %% name="gradients"
def gradient_alone(reduction: str = "mean", middle: nn.Module | None = None) -> Tensor:
    model = build(middle=middle)
    inputs, labels = batch_of(0)
    cross_entropy(model(inputs), labels, reduction=reduction).backward()
    return flat_gradient(model)


def gradient_on_rank(
    rank: int,
    counts: Sequence[int],
    reduction: str = "mean",
    weighted: bool = False,
    middle: nn.Module | None = None,
) -> Tensor:
    """The averaged gradient, where rank r has `counts[r]` of the samples."""
    model = miniddp.SimpleDDP(build(middle=middle))
    inputs, labels = (tensor.split(list(counts))[rank] for tensor in batch_of(0))
    loss = cross_entropy(model(inputs), labels, reduction=reduction)
    if weighted:
        [weight] = mean_weights([len(labels)])
        loss = weight * loss
    loss.backward()
    model.sync_gradients()
    return flat_gradient(model.module)


def error(found: Tensor, joined: Tensor) -> float:
    return ((found - joined).norm() / joined.norm()).item()


def equal_counts(world_size: int) -> list[int]:
    return [SAMPLES // world_size] * world_size


ROUNDING = 1e-13

# %% [markdown]
# ### A loss that sums

# %% name="sum-loss"
joined_sum = gradient_alone(reduction="sum")
rows = []
for world_size in WORLD_SIZES:
    averaged = miniddp.run_ranks(gradient_on_rank, world_size, equal_counts(world_size), "sum")[0]
    ratio = (averaged.norm() / joined_sum.norm()).item()
    after = error(averaged * world_size, joined_sum)
    assert abs(ratio - 1 / world_size) < 1e-9
    assert after < ROUNDING
    rows.append([world_size, f"{ratio:.4f}", f"{after:.0e}"])
table(rows, ["ranks", "length (joined: 1)", "error after × ranks"], "rrr")

# %% [markdown]
# ### Unequal counts

# %% name="unequal"
UNEQUAL = {2: [19, 5], 3: [14, 8, 2], 4: [10, 10, 3, 1]}


def plain_and_weighted(rank: int, counts: Sequence[int]) -> list[Tensor]:
    return [gradient_on_rank(rank, counts, weighted=weighted) for weighted in (False, True)]


joined = gradient_alone()
rows = []
for world_size, counts in UNEQUAL.items():
    averaged = miniddp.run_ranks(plain_and_weighted, world_size, counts)[0]
    plain, weighted = (error(gradient, joined) for gradient in averaged)
    assert weighted < ROUNDING < 0.05 < plain
    split = " + ".join(map(str, counts))
    rows.append([world_size, split, f"{plain:.2f}", f"{weighted:.0e}"])
table(rows, ["ranks", "samples", "error, plain mean", "error, weighted"], "rlrr")

# %% [markdown]
# ### Tokens
#
# Three ranks with four sentence pairs each. A small model predicts each next token; padding has the
# label -100, which the loss leaves out.

# %% name="sentence-pairs"
RANKS, PAIRS = 3, 4
pairs = load_mrpc(data_dir())
tokenizer = load_tokenizer(pairs[:]["sentence1"] + pairs[:]["sentence2"], "tiny", pretrained=False)
VOCABULARY = len(tokenizer)
tokens = encode(pairs.select(range(RANKS * PAIRS)), tokenizer, max_length=128)["input_ids"]
tokens = [torch.tensor(ids) for ids in tokens]
words = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
labels = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-100)


def build_language_model() -> nn.Module:
    miniddp.set_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    return model.double().to(device())


def token_loss(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens that have a label, each predicted from the one before it."""
    predicted = model(words[:, :-1].to(device()))
    return cross_entropy(predicted.flatten(0, 1), labels[:, 1:].flatten().to(device()))


# %% name="tokens"
def token_gradient_on_rank(rank: int, weighted: bool) -> Tensor:
    model = miniddp.SimpleDDP(build_language_model())
    own_words, own_labels = words.chunk(RANKS)[rank], labels.chunk(RANKS)[rank]
    count = int((own_labels[:, 1:] != -100).sum())
    loss = token_loss(model, own_words, own_labels)
    [weight] = mean_weights([count]) if weighted else [1.0]
    print(f"pairs:  {len(own_words)}\ntokens: {count}\nweight: {weight:.3f}")
    (weight * loss).backward()
    model.sync_gradients()
    return flat_gradient(model.module)


language_model = build_language_model()
token_loss(language_model, words, labels).backward()
joined_tokens = flat_gradient(language_model)
by_rank = miniddp.run_ranks(token_gradient_on_rank, RANKS, False)[0]
by_token = miniddp.run_ranks(token_gradient_on_rank, RANKS, True)
show_ranks(by_token)
by_rank_error, by_token_error = (error(found, joined_tokens) for found in (by_rank, by_token[0]))
assert by_token_error < ROUNDING < 1e-3 < by_rank_error
table(
    [["plain", f"{by_rank_error:.2f}"], ["weighted by tokens", f"{by_token_error:.0e}"]],
    ["mean of the ranks", "error"],
    "lr",
)

# %% [markdown]
# ### Batch normalisation
#
# `NormOverRanks` takes mean and variance over the samples of all ranks. It is for training only: it
# keeps no running statistics.


# %% name="norms"
class AddOverRanks(torch.autograd.Function):
    """The sum over the ranks. Each rank's loss depends on it, so the gradients add up too."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return AddOverRanks.apply(gradient)


class NormOverRanks(nn.BatchNorm1d):
    def forward(self, inputs: Tensor) -> Tensor:
        count = AddOverRanks.apply(inputs.new_tensor(len(inputs)))
        mean = AddOverRanks.apply(inputs.sum(dim=0)) / count
        deviations = inputs - mean
        variance = AddOverRanks.apply(deviations.square().sum(dim=0)) / count
        return self.weight * deviations / (variance + self.eps).sqrt() + self.bias


# %% name="batch-norm"
ON_RANKS = {
    "LayerNorm": nn.LayerNorm,
    "BatchNorm1d": nn.BatchNorm1d,
    "NormOverRanks": NormOverRanks,
}
ALONE = ON_RANKS | {"NormOverRanks": nn.BatchNorm1d}


def with_each_norm(rank: int, world_size: int) -> list[Tensor]:
    counts = equal_counts(world_size)
    return [gradient_on_rank(rank, counts, middle=norm(32)) for norm in ON_RANKS.values()]


joined_norms = {name: gradient_alone(middle=norm(32)) for name, norm in ALONE.items()}
errors: dict[str, list[float]] = {name: [] for name in ON_RANKS}
for world_size in (2, 4):
    averaged = miniddp.run_ranks(with_each_norm, world_size, world_size)[0]
    for (name, alone_norm), found in zip(joined_norms.items(), averaged, strict=True):
        errors[name].append(error(found, alone_norm))
assert min(errors["BatchNorm1d"]) > 0.05
assert max(errors["LayerNorm"] + errors["NormOverRanks"]) < ROUNDING
table(
    [[name, *(f"{value:.0e}" for value in values)] for name, values in errors.items()],
    ["layer", "error, 2 ranks", "error, 4 ranks"],
    "lrr",
)


# %% [markdown]
# PyTorch's own layer for this, `SyncBatchNorm`, on this device: alone, and in PyTorch's DDP.


# %% name="sync-batch-norm"
def sync_batch_norm(rank: int) -> Tensor | None:
    layer = nn.SyncBatchNorm(32).to(device())
    inputs = torch.randn(4, 32, device=device())
    attempt("in training mode", lambda: layer(inputs))
    attempt("in evaluation mode", lambda: layer.eval()(inputs))
    attempt("in DDP", lambda: DistributedDataParallel(layer))
    if device().type == "cpu":
        return None
    return gradient_on_rank(rank, equal_counts(2), middle=nn.SyncBatchNorm(32))


def attempt(what: str, call: Callable[[], object]) -> None:
    try:
        call()
        outcome = "runs"
    except ValueError as problem:
        outcome = f"ValueError: {problem}"
    print(textwrap.fill(f"{what}: {outcome}", 30, subsequent_indent="  "))


synchronised = miniddp.run_ranks(sync_batch_norm, 2)
said = " ".join(synchronised.outputs[0].split())
assert "in evaluation mode: runs" in said
if device().type == "cpu":
    assert said.count("ValueError: SyncBatchNorm") == 2
    assert miniddp.run_ranks(sync_batch_norm, 1).outputs[0] == synchronised.outputs[0]
    inputs = torch.randn(4, 32)  # this process is in no process group
    assert torch.equal(nn.SyncBatchNorm(32)(inputs), nn.BatchNorm1d(32)(inputs))
else:
    assert said.count("runs") == 3
    assert error(synchronised[0], joined_norms["BatchNorm1d"]) < ROUNDING
show_ranks(synchronised, title=f"torch.nn.SyncBatchNorm on {device().type}")

# %% [markdown]
# ### Dropout
#
# One seed for the weights, then a seed for each rank: and what the masks are with either.


# %% name="seeds"
def draw(rank: int) -> tuple[float, list[bool], list[bool]]:
    miniddp.set_seed(7)
    model = nn.Linear(1, 1)
    with_one_seed = mask()
    miniddp.set_seed(7, rank_offset=rank)
    with_own_seed = mask()
    print(f"first weight: {model.weight.item():+.4f}")
    print("one seed:     " + "".join("x" if kept else "·" for kept in with_one_seed))
    print("own seed:     " + "".join("x" if kept else "·" for kept in with_own_seed))
    return model.weight.item(), with_one_seed, with_own_seed


def mask() -> list[bool]:
    """Which of 16 elements dropout keeps."""
    return (dropout(torch.ones(16, device=device())) > 0).tolist()


drawn = miniddp.run_ranks(draw, 3)
for other in drawn[1:]:
    assert other[:2] == drawn[0][:2]
    assert other[2] != drawn[0][2]
show_ranks(drawn)

# %% [markdown]
# What it costs: the same batch again and again, each time with new masks. How far does the averaged
# gradient scatter around its mean? Once for the classifier, and once for a regression whose samples
# all pull the prediction the same way.

# %% name="scatter"
DRAWS, DROPOUT_RANKS = 300, 4
Task = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]


def classify() -> Task:
    return build(middle=nn.Dropout(0.5)), cross_entropy, *batch_of(0)


def regress() -> Task:
    miniddp.set_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(32, 1))
    inputs, _ = batch_of(0)
    return model.to(device(), torch.float64), mse_loss, inputs, 3 + inputs[:, :1]


def scatter(rank: int, make_task: Callable[[], Task], world_size: int, own_seed: bool) -> float:
    model, loss_of, *batch = make_task()
    inputs, targets = (tensor.chunk(world_size)[rank] for tensor in batch)
    miniddp.set_seed(7, rank_offset=rank if own_seed else 0)
    gradients = torch.stack([own_gradient(model, loss_of, inputs, targets) for _ in range(DRAWS)])
    gradients /= world_size
    dist.all_reduce(gradients)  # all draws at once: sums do not mind
    return (gradients - gradients.mean(dim=0)).square().sum(dim=1).mean().sqrt().item()


def own_gradient(model: nn.Module, loss_of: Callable, inputs: Tensor, targets: Tensor) -> Tensor:
    model.zero_grad()
    loss_of(model(inputs), targets).backward()
    return flat_gradient(model)


rows = []
for make_task in (classify, regress):
    one_process = miniddp.run_ranks(scatter, 1, make_task, 1, True)[0]
    own_seeds, one_seed = (
        miniddp.run_ranks(scatter, DROPOUT_RANKS, make_task, DROPOUT_RANKS, own_seed)[0]
        / one_process
        for own_seed in (True, False)
    )
    assert abs(own_seeds - 1) < 0.1, "as good as one process"
    assert own_seeds < one_seed < math.sqrt(DROPOUT_RANKS) + 0.1
    rows.append([make_task.__name__, "1.00", f"{own_seeds:.2f}", f"{one_seed:.2f}"])
assert one_seed > 1.4
record(draws=DRAWS, scatter_own_seeds=own_seeds, scatter_one_seed=one_seed)
table(rows, ["task", "one process", "a seed per rank", "one seed for all"], "lrrr")

# %% [markdown]
# ## More ranks, fewer steps
#
# One pass over the same samples with one, two and four ranks, each with the same batch *per rank*.

# %% name="epoch"
EPOCH, PER_RANK, LEARNING_RATE = 768, 8, 0.1
test_inputs, test_labels = batch_of(-1, torch.float64, 2000)


def one_epoch(rank: int, world_size: int, learning_rate: float) -> tuple[int, float]:
    """The number of steps, and the loss on points that were not trained on."""
    model = miniddp.SimpleDDP(build())
    optimizer = SGD(model.parameters(), lr=learning_rate)
    inputs, labels = (tensor.split(world_size * PER_RANK) for tensor in batch_of(0, samples=EPOCH))
    for joined_inputs, joined_labels in zip(inputs, labels, strict=True):
        own_inputs = joined_inputs.chunk(world_size)[rank]
        own_labels = joined_labels.chunk(world_size)[rank]
        cross_entropy(model(own_inputs), own_labels).backward()
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return len(inputs), cross_entropy(model(test_inputs), test_labels).item()


def with_both_rates(rank: int, world_size: int) -> list[tuple[int, float]]:
    rates = (LEARNING_RATE, LEARNING_RATE * world_size)
    return [one_epoch(rank, world_size, rate) for rate in rates]


rows, losses = [], {}
for world_size in (1, 2, 4):
    (steps, same), (_, scaled) = miniddp.run_ranks(with_both_rates, world_size, world_size)[0]
    losses[world_size] = same, scaled
    rows.append([world_size, world_size * PER_RANK, steps, f"{same:.3f}", f"{scaled:.3f}"])
assert losses[1][0] < losses[2][0] < losses[4][0]
assert all(abs(scaled / losses[1][0] - 1) < 0.05 for _, scaled in losses.values())
record(epoch=EPOCH, per_rank=PER_RANK, learning_rate=LEARNING_RATE)
headings = ["ranks", "effective batch", "steps", "loss, same rate", "loss, rate × ranks"]
table(rows, headings, "rrrrr")
