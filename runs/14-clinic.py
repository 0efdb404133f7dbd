# %% [markdown]
# # The clinic
#
# Broken programs, each with its symptom, what a second look shows, and its cure. Every program is
# a function that two or more ranks run. The assertions say that the symptom really occurs, and
# that the cure ends it.

# %% name="setup"
import contextlib
import functools
import linecache
import re
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

import miniddp
from book import provenance, record, show_ranks, table
from instruments.clock import clock
from miniddp.launch import RanksFailed, RanksTimedOut
from miniddp.process import device
from miniddp.replicate import verify_replicas
from miniddp.sampler import shard

provenance(device=device(), world_size=2, backend="gloo")

# %% [markdown]
# ## What the programs share


# %% name="helpers"
def small_model(seed: int = 0) -> nn.Module:
    miniddp.set_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device())


def own_batches(rank: int, count: int) -> list[Tensor]:
    """Batches of 4 samples, different on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 4, generator=generator).to(device()) for _ in range(count)]


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def train(model: nn.Module, batches: Iterable[Tensor]) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for inputs in batches:
        optimizer.zero_grad()
        loss_of(model(inputs)).backward()
        optimizer.step()


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.detach() / dist.get_world_size()
    dist.all_reduce(value)
    return value


def spread(model: nn.Module) -> float:
    """The largest difference of any weight between any two ranks."""
    return max(spread_of(parameter) for parameter in model.parameters())


def spread_of(tensor: Tensor) -> float:
    low, high = tensor.detach().clone(), tensor.detach().clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return (high - low).max().item()


# %% [markdown]
# The rest shows how a program ends: the error of each rank, or the line in which it waits.


# %% name="outcomes"
def say(text: str) -> None:
    print(wrapped(text), flush=True)


def wrapped(text: str, width: int = 38) -> str:
    lines = text.strip().splitlines()
    return "\n".join(textwrap.fill(line.strip(), width, subsequent_indent="  ") for line in lines)


def fails(program: Callable[..., Any], *args: Any) -> list[str]:
    """What each rank ends with: the error's own text, without the traceback."""
    try:
        miniddp.run_ranks(program, 2, *args, timeout=20)
    except RanksFailed as error:
        texts = [error.tracebacks.get(rank, "no error of its own") for rank in range(2)]
        return [re.sub(r"(?s).*?^(?=\w+Error)", "", text, flags=re.M) for text in texts]
    raise AssertionError("the program was expected to fail")


def hangs(program: Callable[..., Any], *args: Any) -> list[str]:
    """The lines of the program in which each rank waits, after 4 seconds."""
    try:
        miniddp.run_ranks(program, 2, *args, timeout=4)
    except RanksTimedOut as error:
        return [lines_of(error.stacks[rank]) for rank in range(2)]
    raise AssertionError("the program was expected to hang")


def lines_of(stack: str) -> str:
    """The program's own lines of a stack, the innermost last, without those of torch."""
    frames = re.findall(r'File "(.*)", line (\d+) in (\w+)', stack)
    own = [frame for frame in reversed(frames) if "site-packages" not in frame[0]]
    lines = [f"{name}:\n  {linecache.getline(file, int(line)).strip()}" for file, line, name in own]
    return "\n".join(["still waiting after 4 s in", *lines])


# %% [markdown]
# ## 1. Rank 1 loads a checkpoint that rank 0 has not written yet


# %% name="early-program"
def load_too_early(rank: int, folder: str) -> Tensor:
    file = Path(folder) / "model.pt"
    model = small_model(seed=rank)
    if rank == 0:
        save_slowly(model.state_dict(), file)
    model.load_state_dict(torch.load(file, map_location=device()))
    return model[0].weight.detach().cpu()


def save_slowly(state: dict[str, Tensor], file: Path) -> None:
    time.sleep(0.5)  # a model of some gigabytes takes longer
    torch.save(state, file)


# %% name="early-symptom"
folder = tempfile.mkdtemp()
too_early = [text.replace(folder, "checkpoints") for text in fails(load_too_early, folder)]
assert too_early[0] == "no error of its own"
assert "FileNotFoundError" in too_early[1]
show_ranks(map(wrapped, too_early))


# %% name="early-diagnosis"
def look_before_loading(rank: int, folder: str) -> None:
    file = Path(folder) / "model.pt"
    if rank == 0:
        print(f"writes {file.name}")
        save_slowly(small_model().state_dict(), file)
    print(f"loads now, the file exists: {file.exists()}")


looks = miniddp.run_ranks(look_before_loading, 2, tempfile.mkdtemp())
assert "exists: True" in looks.outputs[0]
assert "exists: False" in looks.outputs[1]
show_ranks(looks)


# %% name="early-cure"
def load_after_the_barrier(rank: int, folder: str) -> Tensor:
    file = Path(folder) / "model.pt"
    model = small_model(seed=rank)
    if rank == 0:
        save_slowly(model.state_dict(), file)
    dist.barrier()
    model.load_state_dict(torch.load(file, map_location=device()))
    return model[0].weight.detach().cpu()


first, second = miniddp.run_ranks(load_after_the_barrier, 2, tempfile.mkdtemp())
assert torch.equal(first, second)
print("both hold equal weights:", torch.equal(first, second))

# %% [markdown]
# ## 2. The names in the checkpoint begin with `module.`


# %% name="prefix-program"
def save_the_wrapper(rank: int) -> tuple[Tensor, Tensor]:
    ddp = DistributedDataParallel(small_model())
    state = ddp.state_dict()
    restored = small_model(seed=1)
    restored.load_state_dict(state)
    return same_input_through(ddp, restored)


def same_input_through(*models: nn.Module) -> tuple[Tensor, ...]:
    return tuple(model(torch.ones(1, 4, device=device())).detach().cpu() for model in models)


# %% name="prefix-symptom"
prefixed = fails(save_the_wrapper)
assert all('Missing key(s) in state_dict: "0.weight"' in text for text in prefixed)
assert all('Unexpected key(s) in state_dict: "module.0.weight"' in text for text in prefixed)
show_ranks([wrapped(prefixed[0], 70)])


# %% name="prefix-wrong-cure"
def load_what_fits(rank: int) -> tuple[Tensor, Tensor]:
    ddp = DistributedDataParallel(small_model())
    state = ddp.state_dict()
    restored = small_model(seed=1)
    missing, unexpected = restored.load_state_dict(state, strict=False)
    print("missing:", ", ".join(missing))
    print("unexpected:", ", ".join(unexpected))
    return same_input_through(ddp, restored)


fits = miniddp.run_ranks(load_what_fits, 2)
trained, restored = fits[0]
assert "missing: 0.weight" in fits.outputs[0]
assert not torch.allclose(trained, restored)
show_ranks(fits.outputs[:1])
print(f"saved {trained.item():.4f}, restored {restored.item():.4f}")


# %% name="prefix-cure"
def save_the_module(rank: int) -> tuple[Tensor, Tensor]:
    ddp = DistributedDataParallel(small_model())
    state = ddp.module.state_dict()
    restored = small_model(seed=1)
    restored.load_state_dict(state)
    return same_input_through(ddp, restored)


trained, restored = miniddp.run_ranks(save_the_module, 2)[0]
assert torch.equal(trained, restored)
print(f"saved {trained.item():.4f}, restored {restored.item():.4f}")

# %% [markdown]
# ## 3. Reentrant checkpointing meets `find_unused_parameters`


# %% name="reentrant-program"
class Checkpointed(nn.Module):
    """Computes its second layer again in backward, in order to save memory."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        if self.use_reentrant is None:
            return self.second(hidden)
        return checkpoint(self.second, hidden, use_reentrant=self.use_reentrant)


def checkpoint_reentrant(
    rank: int, use_reentrant: bool | None = True, find_unused: bool = True
) -> list[Tensor]:
    miniddp.set_seed(0)
    model = Checkpointed(use_reentrant).to(device())
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    loss_of(ddp(own_batches(rank, 1)[0])).backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


# %% name="reentrant-symptom"
twice = fails(checkpoint_reentrant)
assert all("Expected to mark a variable ready only once" in text for text in twice)
first_sentence = twice[0].partition(" This error")[0]
which = re.search(r"Parameter at index.*?marked as ready twice\.", twice[0])
assert "second" in which[0]
show_ranks([wrapped(first_sentence + " […]\n" + which[0], 70)])


# %% name="reentrant-diagnosis"
rows = []
for use_reentrant in (True, False):
    for find_unused in (True, False):
        try:
            miniddp.run_ranks(checkpoint_reentrant, 2, use_reentrant, find_unused)
            ending = "passes"
        except RanksFailed:
            ending = "fails"
        rows.append([f"`{use_reentrant}`", f"`{find_unused}`", ending])
assert [row[2] for row in rows] == ["fails", "passes", "passes", "passes"]
table(rows, ["use_reentrant", "find_unused_parameters", "backward"], align="lll")


# %% name="reentrant-cure"
def checkpoint_not_reentrant(rank: int) -> list[Tensor]:
    return checkpoint_reentrant(rank, use_reentrant=False)


with_checkpoint = miniddp.run_ranks(checkpoint_not_reentrant, 2)[0]
without = miniddp.run_ranks(checkpoint_reentrant, 2, None)[0]
assert all(torch.equal(a, b) for a, b in zip(with_checkpoint, without, strict=True))
print("gradients as without it: True")

# %% [markdown]
# ## 4. A collective that only rank 0 calls


# %% name="branch-program"
def evaluate_on_rank_0(rank: int) -> float | None:
    ddp = DistributedDataParallel(small_model())
    train(ddp, own_batches(rank, 2))
    mean = None
    if rank == 0:
        mean = evaluate(ddp.module, own_batches(rank, 1)[0])
        print(f"mean loss {mean:.4f}")
    dist.barrier()
    return mean


def evaluate(model: nn.Module, inputs: Tensor) -> float:
    with torch.no_grad():
        loss = loss_of(model(inputs)) / dist.get_world_size()
    dist.all_reduce(loss)
    return loss.item()


# %% name="branch-symptom"
branched = hangs(evaluate_on_rank_0)
assert "dist.all_reduce(loss)" in branched[0]
assert "dist.barrier()" in branched[1]
show_ranks(branched)


# %% name="branch-diagnosis"
def announce_collectives() -> None:
    """For those that the program calls by name. DDP's own do not pass through here."""
    for name in ("all_reduce", "barrier"):
        setattr(dist, name, announce(name, getattr(dist, name)))


def announce(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        print(f"enters {name}", flush=True)
        result = collective(*args, **kwargs)
        print(f"leaves {name}", flush=True)
        return result

    return call


def watch_evaluation(rank: int) -> None:
    announce_collectives()
    evaluate_on_rank_0(rank)


try:
    miniddp.run_ranks(watch_evaluation, 2, timeout=4)
except RanksTimedOut as error:
    watched = error.outputs
assert watched == ["enters all_reduce\n", "enters barrier\n"]
show_ranks(watched)


# %% name="branch-cure"
def evaluate_on_all_ranks(rank: int) -> float:
    ddp = DistributedDataParallel(small_model())
    train(ddp, own_batches(rank, 2))
    mean = evaluate(ddp.module, own_batches(rank, 1)[0])
    if rank == 0:
        print(f"mean loss {mean:.4f}")
    dist.barrier()
    return mean


everywhere = miniddp.run_ranks(evaluate_on_all_ranks, 2)
assert everywhere[0] == everywhere[1]
show_ranks([everywhere.outputs[0], everywhere.outputs[1] or "(prints nothing)"])

# %% [markdown]
# ## 5. One rank has a batch more


# %% name="uneven-program"
def train_unevenly(rank: int) -> tuple[int, float]:
    ddp = DistributedDataParallel(small_model())
    batches = own_batches(rank, 4 - rank)
    train(ddp, batches)
    dist.barrier()
    return len(batches), spread(ddp)


# %% name="uneven-symptom"
uneven = hangs(train_unevenly)
assert "backward()" in uneven[0]
assert "dist.barrier()" in uneven[1]
show_ranks(uneven)


# %% name="uneven-diagnosis"
def compare_lengths(rank: int) -> list[int]:
    batches = own_batches(rank, 4 - rank)
    lengths: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(lengths, len(batches))
    if rank == 0:
        print("batches per rank:", lengths)
    return lengths


lengths = miniddp.run_ranks(compare_lengths, 2)
assert lengths[0] == [4, 3]
print(lengths.outputs[0], end="")


# %% name="uneven-cure"
def train_joined(rank: int) -> tuple[int, float]:
    ddp = DistributedDataParallel(small_model())
    batches = own_batches(rank, 4 - rank)
    with Join([ddp]):
        train(ddp, batches)
    dist.barrier()
    return len(batches), spread(ddp)


joined = miniddp.run_ranks(train_joined, 2)
assert [count for count, _ in joined] == [4, 3]
assert joined[0][1] == 0
for rank, (count, difference) in enumerate(joined):
    print(f"rank {rank}: {count} batches, weights differ by {difference:g}")

# %% [markdown]
# ## 6. Each rank decides for itself when to stop


# %% name="stop-program"
def stop_alone(rank: int) -> int:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = 0
    for inputs in own_batches(rank, 40):
        steps += 1
        loss = loss_of(ddp(inputs * (1 + rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    dist.barrier()
    return steps


# %% name="stop-symptom"
stopped_alone = hangs(stop_alone)
assert "dist.barrier()" in stopped_alone[0]
assert "loss.backward()" in stopped_alone[1]
show_ranks(stopped_alone)


# %% name="stop-diagnosis"
def say_why_it_stops(rank: int) -> int:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = miniddp.SimpleDDP(model)
    stop, batches = None, own_batches(rank, 40)
    for step, inputs in enumerate(batches, 1):
        loss = loss_of(ddp(inputs * (1 + rank)))
        optimizer.zero_grad()
        loss.backward()
        ddp.sync_gradients()
        optimizer.step()
        if stop is None and loss.item() < 0.01:
            stop = step
            print(f"step {step} of {len(batches)}: would stop, loss {loss.item():.4f}")
    return step if stop is None else stop


stops = miniddp.run_ranks(say_why_it_stops, 2)
assert stops[0] < stops[1]
show_ranks(stops)


# %% name="stop-cure"
def stop_together(rank: int) -> int:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = 0
    for inputs in own_batches(rank, 40):
        steps += 1
        loss = loss_of(ddp(inputs * (1 + rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if mean_over_ranks(loss).item() < 0.01:
            break
    dist.barrier()
    return steps


together = miniddp.run_ranks(stop_together, 2)
assert together[0] == together[1] < 40
for rank, steps in enumerate(together):
    print(f"rank {rank} stops after {steps} steps")

# %% [markdown]
# ## 7. Every rank reads all the data


# %% name="same-program"
SAMPLES = 32


def read_everything(rank: int) -> list[int]:
    miniddp.set_seed(0)
    loader = DataLoader(range(SAMPLES), batch_size=4, shuffle=True)
    return [sample for batch in loader for sample in batch.tolist()]


# %% name="same-symptom"
everything = miniddp.run_ranks(read_everything, 2)
assert everything[0] == everything[1]
assert len(everything[0]) == SAMPLES
table(
    [[rank, len(samples) // 4, SAMPLES // 4 // 2] for rank, samples in enumerate(everything)],
    ["rank", "steps per epoch", "expected"],
)


# %% name="same-diagnosis"
def show_reading(per_rank: Sequence[list[int]]) -> None:
    for rank, samples in enumerate(per_rank):
        print(f"rank {rank} reads {samples[:5]} …")
    shared = set(per_rank[0]) & set(per_rank[1])
    print(f"read by both: {len(shared)} of {SAMPLES} samples")


show_reading(everything)


# %% name="same-cure"
def read_own_part(rank: int) -> list[int]:
    miniddp.set_seed(0)
    sampler = DistributedSampler(range(SAMPLES), shuffle=True)
    loader = DataLoader(range(SAMPLES), batch_size=4, sampler=sampler)
    return [sample for batch in loader for sample in batch.tolist()]


parts = miniddp.run_ranks(read_own_part, 2)
assert sorted(parts[0] + parts[1]) == list(range(SAMPLES))
show_reading(parts)

# %% [markdown]
# ## 8. The forward pass goes around the wrapper


# %% name="around-program"
def call_the_module(rank: int) -> float:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for inputs in own_batches(rank, 5):
        optimizer.zero_grad()
        loss_of(ddp.module(inputs)).backward()
        optimizer.step()
    report(ddp.module)
    return spread(ddp)


def report(model: nn.Module) -> None:
    try:
        verify_replicas(model)
        say("replicas identical")
    except ValueError as error:
        say(str(error).partition(" (")[0])


# %% name="around-symptom"
around = miniddp.run_ranks(call_the_module, 2)
assert around[0] > 0.01
assert all("replicas differ" in text for text in around.outputs)
record(around_spread=around[0])
show_ranks(around)


# %% name="around-diagnosis"
def compare_gradients(model: nn.Module) -> None:
    """Says of each parameter whether all ranks hold the same gradient."""
    for name, parameter in model.named_parameters():
        equal = spread_of(parameter.grad) == 0
        print(f"{name:9}", "same" if equal else "DIFFERENT")


def gradients_of_the_module(rank: int) -> None:
    ddp = DistributedDataParallel(small_model())
    loss_of(ddp.module(own_batches(rank, 1)[0])).backward()
    compare_gradients(ddp.module)


compared = miniddp.run_ranks(gradients_of_the_module, 2)
assert compared.outputs[0].count("DIFFERENT") == 4
print(compared.outputs[0], end="")


# %% name="around-cure"
def call_the_wrapper(rank: int) -> float:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for inputs in own_batches(rank, 5):
        optimizer.zero_grad()
        loss_of(ddp(inputs)).backward()
        optimizer.step()
    report(ddp.module)
    return spread(ddp)


through = miniddp.run_ranks(call_the_wrapper, 2)
assert list(through) == [0, 0]
show_ranks(through)

# %% [markdown]
# ## 9. A layer is unfrozen after the model was wrapped


# %% name="unfreeze-program"
def unfreeze_after_wrapping(rank: int) -> float:
    model = small_model()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    train(ddp, own_batches(rank, 2))
    model[0].requires_grad_(True)
    train(ddp, own_batches(rank, 3))
    report(model)
    return spread(model)


# %% name="unfreeze-symptom"
unfrozen = miniddp.run_ranks(unfreeze_after_wrapping, 2)
assert unfrozen[0] > 0.001
record(unfreeze_spread=unfrozen[0])
show_ranks(unfrozen)


# %% name="unfreeze-diagnosis"
def gradients_after_unfreezing(rank: int) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    loss_of(ddp(own_batches(rank, 1)[0])).backward()
    compare_gradients(model)


compared = miniddp.run_ranks(gradients_after_unfreezing, 2)
assert re.findall(r"(\S+) +DIFFERENT", compared.outputs[0]) == ["0.weight", "0.bias"]
print(compared.outputs[0], end="")


# %% name="unfreeze-cure"
def wrap_again_after_unfreezing(rank: int) -> float:
    model = small_model()
    model[0].requires_grad_(False)
    train(DistributedDataParallel(model), own_batches(rank, 2))
    model[0].requires_grad_(True)
    train(DistributedDataParallel(model), own_batches(rank, 3))
    report(model)
    return spread(model)


wrapped_again = miniddp.run_ranks(wrap_again_after_unfreezing, 2)
assert list(wrapped_again) == [0, 0]
show_ranks(wrapped_again)

# %% [markdown]
# ## 10. Clipping before the ranks are averaged


# %% name="clip-program"
def clip_then_synchronise(rank: int) -> Tensor:
    ddp = miniddp.SimpleDDP(small_model())
    unequal_loss(ddp, [rank]).backward()
    clip_grad_norm_(ddp.parameters(), max_norm=1.0)
    ddp.sync_gradients()
    return flat_gradient(ddp)


def unequal_loss(model: nn.Module, ranks: Sequence[int]) -> Tensor:
    """The loss on the batches of these ranks, joined. The targets of rank 1 are far away."""
    inputs = torch.cat([own_batches(rank, 1)[0] for rank in ranks])
    targets = torch.tensor([[(-0.5, 4.0)[rank]] for rank in ranks for _ in range(4)])
    return loss_of(model(inputs) - targets.to(device()))


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).cpu()


def clipped_alone() -> Tensor:
    """The clipped gradient of one process with both batches: what each rank should have."""
    model = small_model()
    unequal_loss(model, [0, 1]).backward()
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    return flat_gradient(model)


# %% name="clip-symptom"
def similarity(gradient: Tensor, reference: Tensor) -> str:
    cosine = torch.cosine_similarity(gradient, reference, dim=0).item()
    return f"norm {gradient.norm():.2f}, cosine {cosine:.2f}"


clipped_first = miniddp.run_ranks(clip_then_synchronise, 2)
assert torch.equal(clipped_first[0], clipped_first[1])
assert clipped_first[0].norm() < 0.9
print("one process:", similarity(clipped_alone(), clipped_alone()))
print("both ranks: ", similarity(clipped_first[0], clipped_alone()))


# %% name="clip-diagnosis"
def show_norms(rank: int) -> None:
    ddp = miniddp.SimpleDDP(small_model())
    unequal_loss(ddp, [rank]).backward()
    print(f"own       {flat_gradient(ddp).norm():.2f}")
    clip_grad_norm_(ddp.parameters(), max_norm=1.0)
    print(f"clipped   {flat_gradient(ddp).norm():.2f}")
    ddp.sync_gradients()
    print(f"averaged  {flat_gradient(ddp).norm():.2f}")


norms = miniddp.run_ranks(show_norms, 2)
show_ranks(norms)


# %% name="clip-cure"
def synchronise_then_clip(rank: int) -> Tensor:
    ddp = miniddp.SimpleDDP(small_model())
    unequal_loss(ddp, [rank]).backward()
    ddp.sync_gradients()
    clip_grad_norm_(ddp.parameters(), max_norm=1.0)
    return flat_gradient(ddp)


clipped_last = miniddp.run_ranks(synchronise_then_clip, 2)
assert torch.allclose(clipped_last[0], clipped_alone(), atol=1e-6)
print("both ranks: ", similarity(clipped_last[0], clipped_alone()))

# %% [markdown]
# ## 11. Batch normalisation forgets what the other ranks saw


# %% name="norm-program"
def keep_the_statistics_of_rank_0(rank: int) -> tuple[float, float]:
    ddp = DistributedDataParallel(normalised_model())
    for inputs in shifted_batches(rank):
        loss_of(ddp(inputs)).backward()
    return evaluate_normalisation(ddp.module[0])


def evaluate_normalisation(layer: nn.Module) -> tuple[float, float]:
    """The running mean, and the mean of all data after the layer has normalised them."""
    everything = torch.cat(shifted_batches(0) + shifted_batches(1))
    return layer.running_mean.item(), layer.eval()(everything).mean().item()


def normalised_model() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).to(device())


def shifted_batches(rank: int) -> list[Tensor]:
    """The mean of the data is 0 on rank 0 and 4 on rank 1; over both it is 2."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(16, 1, generator=generator) + 4 * rank).to(device()) for _ in range(60)]


# %% name="norm-symptom"
forgotten = miniddp.run_ranks(keep_the_statistics_of_rank_0, 2)
assert abs(forgotten[0][0]) < 0.5
assert forgotten[1][0] < 1
assert forgotten[0][1] > 1


def show_means(per_rank: Sequence[tuple[float, float]]) -> None:
    show_ranks(
        f"running mean     {running:5.2f}\nnormalised data  {normalised:5.2f}"
        for running, normalised in per_rank
    )


show_means(forgotten)


# %% name="norm-diagnosis"
def follow_the_buffer(rank: int) -> None:
    ddp = DistributedDataParallel(normalised_model())
    buffer = ddp.module[0].running_mean
    for inputs in shifted_batches(rank)[:3]:
        before = buffer.item()
        received = []
        hook = ddp.module.register_forward_pre_hook(
            lambda *_, received=received: received.append(buffer.item())
        )
        loss_of(ddp(inputs)).backward()
        hook.remove()
        values = (before, received[0], buffer.item())
        print(" → ".join(f"{round(value, 2) + 0:5.2f}" for value in values))


followed = miniddp.run_ranks(follow_the_buffer, 2)
show_ranks(followed)


# %% name="norm-cure"
def average_the_statistics(rank: int) -> tuple[float, float]:
    ddp = DistributedDataParallel(normalised_model())
    for inputs in shifted_batches(rank):
        loss_of(ddp(inputs)).backward()
        average_buffers(ddp.module)
    return evaluate_normalisation(ddp.module[0])


def average_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(mean_over_ranks(buffer))


averaged = miniddp.run_ranks(average_the_statistics, 2)
assert averaged[0] == averaged[1]
assert abs(averaged[0][0] - 2) < 0.3
assert abs(averaged[0][1]) < 0.3
show_means(averaged)

# %% [markdown]
# ## 12. One NaN, and every rank is lost


# %% name="nan-program"
def step_with_whatever_comes(rank: int) -> bool:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, inputs in enumerate(batches_with_a_bad_one(rank)):
        loss = loss_of(ddp(inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    return all(parameter.isfinite().all().item() for parameter in ddp.parameters())


def batches_with_a_bad_one(rank: int) -> list[Tensor]:
    batches = own_batches(rank, 4)
    if rank == 1:
        batches[1][0, 0] = float("nan")
    return batches


# %% name="nan-symptom"
spreads = miniddp.run_ranks(step_with_whatever_comes, 2)
assert list(spreads) == [False, False]
assert spreads.outputs[0].count("nan") == 2
assert spreads.outputs[1].count("nan") == 3
show_ranks(spreads)


# %% name="nan-diagnosis"
def name_the_rank(rank: int) -> None:
    ddp = DistributedDataParallel(small_model())
    ddp.register_comm_hook(rank, check_before_sending)
    train(ddp, batches_with_a_bad_one(rank)[:2])


def check_before_sending(rank: int, bucket):
    if not bucket.buffer().isfinite().all():
        print(f"rank {rank} sends what is not finite")
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


named = miniddp.run_ranks(name_the_rank, 2)
assert [len(text) > 0 for text in named.outputs] == [False, True]
print("".join(named.outputs), end="")


# %% name="nan-cure"
def skip_the_step_together(rank: int) -> bool:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, inputs in enumerate(batches_with_a_bad_one(rank)):
        loss = loss_of(ddp(inputs))
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(ddp.parameters(), max_norm=1.0)
        if norm.isfinite():
            optimizer.step()
        note = "" if norm.isfinite() else " skipped"
        print(f"step {step}: loss {loss.item():.3f}{note}")
    return all(parameter.isfinite().all().item() for parameter in ddp.parameters())


skipped = miniddp.run_ranks(skip_the_step_together, 2)
assert list(skipped) == [True, True]
assert all(text.count("skipped") == 1 for text in skipped.outputs)
show_ranks(skipped)

# %% [markdown]
# ## 13. One rank has the long sequences


# %% name="straggler-program"
def shards_in_blocks(rank: int, probe: bool = False) -> dict[str, float]:
    lengths = lengths_of_the_data()
    mine = [lengths[i] for i in shard(len(lengths), 2, rank, contiguous=True)]
    return work_on(mine, probe)


def lengths_of_the_data() -> list[int]:
    """Sorted, as some data sets come: from 16 to 512 tokens."""
    generator = torch.Generator().manual_seed(0)
    return sorted(torch.randint(16, 513, (64,), generator=generator).tolist())


def work_on(lengths: Sequence[int], probe: bool) -> dict[str, float]:
    """The tokens of this rank, and its seconds. With `probe`, no step sends gradients."""
    miniddp.set_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(device()))
    forward = backward = wait = 0.0
    for length in lengths:
        inputs = torch.ones(4 * length, 256, device=device())
        with ddp.no_sync() if probe else contextlib.nullcontext():
            moments = [clock()]
            loss = loss_of(ddp(inputs))
            moments.append(clock())
            loss.backward()
            moments.append(clock())
        dist.barrier()
        moments.append(clock())
        forward += moments[1] - moments[0]
        backward += moments[2] - moments[1]
        wait += moments[3] - moments[2]
    seconds = {"forward": forward, "backward": backward, "wait": wait}
    return {"tokens": sum(lengths), **seconds}


# %% name="straggler-symptom"
blocks = miniddp.run_ranks(shards_in_blocks, 2)
ratios = [times["backward"] / times["forward"] for times in blocks]
assert ratios[0] > 1.5 * ratios[1]
record(backward_ratio_0=ratios[0], backward_ratio_1=ratios[1])
table(
    [[rank, f"{ratio:.1f}"] for rank, ratio in enumerate(ratios)],
    ["rank", "backward / forward"],
    align="rr",
)


# %% name="straggler-diagnosis"
def wait_share(times: dict[str, float]) -> float:
    return times["wait"] / (times["forward"] + times["backward"] + times["wait"])


def show_waiting(per_rank: Sequence[dict[str, float]]) -> None:
    table(
        [[rank, each["tokens"], f"{wait_share(each):.0%}"] for rank, each in enumerate(per_rank)],
        ["rank", "tokens", "share of its time spent waiting"],
        align="rrr",
    )


probed = miniddp.run_ranks(shards_in_blocks, 2, True)
assert wait_share(probed[0]) > 0.3
assert wait_share(probed[0]) > 2 * wait_share(probed[1])
record(waited_percent=100 * wait_share(probed[0]))
show_waiting(probed)


# %% name="straggler-cure"
def shards_dealt_in_turn(rank: int, probe: bool = False) -> dict[str, float]:
    lengths = lengths_of_the_data()
    mine = [lengths[i] for i in shard(len(lengths), 2, rank)]
    return work_on(mine, probe)


dealt = miniddp.run_ranks(shards_dealt_in_turn, 2, True)
assert 1.3 * max(map(wait_share, dealt)) < wait_share(probed[0])
record(waited_percent_cured=100 * max(map(wait_share, dealt)))
show_waiting(dealt)
