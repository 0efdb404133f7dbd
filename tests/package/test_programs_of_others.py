"""Loops in the styles of other people: the same gradients with both classes, to the bit."""

import copy
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_wrapper,
)
from torch.distributed.nn.functional import all_gather as all_gather_with_gradient
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import miniddp
from miniddp.process import device

from .ranks import run

Wrap = Callable[..., Any]
Program = Callable[[Wrap, int], Iterator[nn.Module]]


def inputs(rank: int, step: int, *shape: int) -> Tensor:
    generator = torch.Generator(device()).manual_seed(100 * rank + step)
    return torch.randn(*(shape or (5, 4)), generator=generator)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(ddp: nn.Module, rank: int, steps: int = 3) -> Iterator[nn.Module]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(inputs(rank, step)).square().mean().backward()
        yield ddp
        optimizer.step()


def copied_after_steps(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(net())
    yield from train(ddp, rank)
    yield from train(copy.deepcopy(ddp), rank)


def pickled_after_steps(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(net())
    yield from train(ddp, rank)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    yield from train(torch.load(file, weights_only=False), rank)


class Redirected(nn.Module):
    """Lightning's way: the wrapper calls `training_step` where it thinks it calls `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def redirected_forward(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    module = Redirected()
    ddp = wrap(module)
    original = module.forward

    def redirect(x: Tensor) -> Tensor:
        module.forward = original
        return module.training_step(x)

    for step in range(3):
        module.forward = redirect
        ddp(inputs(rank, step)).backward()
        yield ddp


def evaluation_in_inference_mode(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(net())
    for step in range(3):
        ddp.eval()
        with torch.inference_mode():
            ddp(inputs(rank, 10 + step))
        ddp.train()
        ddp(inputs(rank, step)).square().mean().backward()
        yield ddp


def evaluation_between_forward_and_backward(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(net())
    for step in range(3):
        output = ddp(inputs(rank, step))
        ddp.eval()
        target = ddp(inputs(rank, 10 + step)).detach()
        ddp.train()
        (output - target).square().mean().backward()
        yield ddp


def two_optimizers(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(net())
    first = torch.optim.SGD(ddp.module[0].parameters(), lr=0.1)
    last = torch.optim.Adam(ddp.module[2].parameters(), lr=0.01)
    for step in range(4):
        ddp.zero_grad()
        ddp(inputs(rank, step)).square().mean().backward()
        yield ddp
        (last if step % 2 else first).step()


def optimizers_in_hooks(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    """Each rank steps by its own gradient, before anything is sent: as torch."""
    module = nn.Linear(4, 2)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in module.parameters()}
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    ddp = wrap(module)
    for step in range(3):
        ddp(inputs(rank, step)).square().mean().backward()
        yield ddp


def two_networks(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    generator = wrap(nn.Linear(3, 4))
    critic = wrap(nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1)))
    for step in range(3):
        real = inputs(rank, step).requires_grad_()
        fake = generator(inputs(rank, step, 5, 3))
        critic.zero_grad()
        scores = critic(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (critic(fake.detach()).mean() - scores.mean() + penalty).backward()
        yield critic
        generator.zero_grad()
        (-critic(fake).mean()).backward()
        yield generator


class Unlearned(torch.autograd.Function):
    """Has no gradient for its second input."""

    @staticmethod
    def forward(context: Any, x: Tensor, factor: Tensor) -> Tensor:
        context.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (factor,) = context.saved_tensors
        return gradient * factor, None


class Mixed(nn.Module):
    """Four dtypes, a scalar, nothing at all, one matrix in three places, a state."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.LSTM(4, 4)
        self.coarse = nn.Linear(4, 4).bfloat16()
        self.fine = nn.Linear(4, 4).double()
        self.complex = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.factor = nn.Parameter(torch.ones(4))
        self.tied = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
        for layer in self.tied:
            layer.weight = self.tied[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.state(x)
        x = self.fine(self.coarse(x.bfloat16()).double()).float()
        x = (x.to(torch.cfloat) @ self.complex).abs() * self.scale + self.nothing.sum()
        for layer in self.tied:
            x = layer(x).tanh()
        return Unlearned.apply(x, self.factor)


def many_kinds_of_parameters(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    yield from train(wrap(Mixed(), find_unused_parameters=True), rank)


def backward_in_a_thread(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(net())
    thread = threading.Thread(target=ddp(inputs(rank, 0)).sum().backward)
    thread.start()
    thread.join()
    yield ddp


def wrapped_again(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(net())
    yield from train(ddp, rank)
    yield from train(wrap(ddp.module), rank)


class Boxes:
    """As a detector's instances: tensors in an object that nobody can look into."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Boxes:
        return Boxes(self.net(x))


def tensors_in_an_object(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(Detector())
    for step in range(3):
        ddp.zero_grad()
        ddp(inputs(rank, step)).scores.square().mean().backward()
        yield ddp


def average_of_the_wrapper(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(net())
    average = AveragedModel(ddp, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
    for trained in train(ddp, rank):
        average.update_parameters(trained)
        yield trained
        average(inputs(rank, 20)).sum().backward()
        yield average


def line_search(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    """A closure runs forward and backward as often as the optimizer likes."""
    ddp = wrap(nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ddp(inputs(rank, 0)).square().mean()
        loss.backward()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        return total

    for _ in range(2):
        optimizer.step(closure)
        yield ddp


def collectives_in_the_loss(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    """CLIP's loss: all ranks' outputs, whose backward sends while buckets are under way."""
    ddp = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), bucket_cap_mb=0.0001)
    for step in range(3):
        ddp.zero_grad()
        everyone = torch.cat(all_gather_with_gradient(ddp(inputs(rank, step))))
        similar = everyone @ everyone.T
        nn.functional.cross_entropy(similar, torch.arange(len(similar)).roll(1)).backward()
        yield ddp


class Experts(nn.Module):
    """Which of them are used depends on the rank's data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                output[rows] = weights[rows, None] * expert(x[rows])
        return output


def experts_of_each_rank(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    for views in (False, True):
        ddp = wrap(Experts(), find_unused_parameters=True, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            ddp(inputs(rank, step, 2, 4)).square().mean().backward()
            yield ddp
            optimizer.step()


class Adapting(nn.Module):
    """MAML: a step of training inside forward, and the gradient through it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, support: Tensor, query: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = functional_call(self.net, weights, support).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {
            name: weight - 0.1 * slope
            for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }
        return functional_call(self.net, adapted, query).square().mean()


def a_step_inside_forward(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    ddp = wrap(Adapting())
    for step in range(3):
        ddp.zero_grad()
        ddp(inputs(rank, step), inputs(rank, 10 + step)).backward()
        yield ddp


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def pruned_while_training(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    """The same parameters, under other names."""
    ddp = wrap(Branches(), find_unused_parameters=True)
    yield from train(ddp, rank)
    prune.l1_unstructured(ddp.module.used, "weight", amount=0.3)
    prune.l1_unstructured(ddp.module.unused, "weight", amount=0.3)
    yield from train(ddp, rank)


def flat_gradients(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    """Apex's way: every `.grad` is a part of one vector, which keeps its memory."""
    ddp = wrap(nn.Linear(4, 2))
    flat = torch.zeros(10)
    ddp.module.weight.grad = flat[:8].view(2, 4)
    ddp.module.bias.grad = flat[8:]
    for step in range(3):
        flat.zero_()
        ddp(inputs(rank, step)).square().mean().backward()
        assert torch.equal(ddp.module.bias.grad, flat[8:])
        yield ddp


class Cached(nn.Module):
    """Its one buffer is made in the first forward, of this rank's data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.std(0))
        return self.net(x / self.scale)


def a_buffer_made_in_forward(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    yield from train(wrap(Cached()), rank)


class Hiding(nn.Module):
    """Shows an optimizer the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **options):
            if not name.startswith("body."):
                yield name, parameter

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def parameters_that_the_model_hides(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    for find_unused in (False, True):
        ddp = wrap(Hiding(), find_unused_parameters=find_unused)
        ddp(inputs(rank, 0)).square().mean().backward()
        yield ddp.module.body
        yield ddp.module.head


def a_hook_inside_torchs_wrapper(wrap: Wrap, rank: int) -> Iterator[nn.Module]:
    """It sets the bucket's buffer to one of 16 bits: that is what the hook sends."""
    ddp = wrap(net(), bucket_cap_mb=0.0001)
    ddp.register_comm_hook(None, fp16_compress_wrapper(allreduce_hook))
    yield from train(ddp, rank)


PROGRAMS: list[Program] = [
    copied_after_steps,
    pickled_after_steps,
    redirected_forward,
    evaluation_in_inference_mode,
    evaluation_between_forward_and_backward,
    two_optimizers,
    optimizers_in_hooks,
    two_networks,
    many_kinds_of_parameters,
    backward_in_a_thread,
    wrapped_again,
    tensors_in_an_object,
    average_of_the_wrapper,
    line_search,
    collectives_in_the_loss,
    experts_of_each_rank,
    a_step_inside_forward,
    pruned_while_training,
    flat_gradients,
    a_buffer_made_in_forward,
    parameters_that_the_model_hides,
    a_hook_inside_torchs_wrapper,
]


def both(rank: int, program: Program) -> int:
    warnings.simplefilter("ignore")
    found = []
    for wrap in (TorchDDP, miniddp.DistributedDataParallel):
        torch.manual_seed(0)
        found.append([held(module) for module in program(wrap, rank)])
    theirs, ours = found
    assert len(ours) == len(theirs) > 0
    for number, (wanted, came) in enumerate(zip(theirs, ours, strict=True)):
        assert came.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(came[name], wanted[name]), f"{name}, after pass {number}"
    return len(ours)


def held(module: nn.Module) -> dict[str, Tensor]:
    """Gradients, weights and buffers, copied."""
    gradients = {
        f"{name}.grad": p.grad for name, p in module.named_parameters() if p.grad is not None
    }
    assert gradients
    return {name: t.detach().clone() for name, t in {**gradients, **module.state_dict()}.items()}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_both_classes_leave_the_same_bits(program: Program) -> None:
    run(both, 2, program, timeout=60)
