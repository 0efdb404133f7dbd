"""The loop of a program: forward and backward passes in every order."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .model import WIDTH, Net, Spec, heads_of

Trace = list[tuple[str, dict[str, Tensor | None]]]
Event = tuple[str, nn.Module, bool]


class Run:
    """One rank's program while it runs."""

    def __init__(self, spec: Spec, rank: int, model: nn.Module, net: Net) -> None:
        self.spec = spec
        self.rank = rank
        self.model = model
        self.net = net
        self.trace: Trace = []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.new_optimizer()

    def new_optimizer(self) -> None:
        momentum = self.spec.get("momentum", 0.0)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=momentum)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.model.modules():
                if hasattr(module, "no_sync"):
                    stack.enter_context(module.no_sync())
            yield

    def note(self, label: str, gradients: bool = True) -> None:
        found: dict[str, Tensor | None] = {}
        for name, p in self.net.named_parameters():
            value = p.grad if gradients else p
            found[name.replace("module.", "")] = None if value is None else value.detach().clone()
        if not gradients:
            for name, buffer in self.net.named_buffers():
                found[name.replace("module.", "")] = buffer.detach().clone()
        self.trace.append((label, found))

    def inputs(self, step: int, micro: int) -> Tensor:
        number = self.spec["seed"] * 1000 + step * 100 + micro * 10 + self.rank
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(3, WIDTH, generator=generator)
        return x.requires_grad_(bool(self.spec.get("input gradient", True)))

    def used(self, step: int) -> list[bool]:
        uses = {
            "odd steps": step % 2 == 1,
            "rank 0": self.rank == 0,
            "changing ranks": step % 2 == self.rank % 2,
            "never": False,
        }
        return [uses.get(block.get("branch", ""), True) for block in self.spec["blocks"]]

    def forward(
        self, x: Tensor, step: int, sync: bool = True, grad: bool = True
    ) -> Generator[Event, None, Any]:
        yield "forward", self.net, sync and grad
        with torch.set_grad_enabled(grad):
            return heads_of(self.model(x, self.used(step)))

    def loss(self, heads: list[Tensor], step: int) -> Tensor:
        if self.spec.get("output") == "with parameter":
            heads = [heads[0] * heads[1]]
        total = sum(head.square().mean() for head in heads)
        assert isinstance(total, Tensor)
        if self.spec.get("overflow") == step and self.rank == 1:
            total = total * float("inf")
        return total

    def backward(
        self, loss: Tensor, label: str, sync: bool, **options: Any
    ) -> Generator[Event, None, None]:
        if self.spec.get("scaler"):
            loss = self.scaler.scale(loss)
        loss.backward(**options)
        if sync:
            yield "average", self.net, True
        self.note(label)


def between(run: Run, number: int, what: str) -> Generator[Event, None, None]:
    if what == "evaluation":
        run.model.eval()
        yield from run.forward(run.inputs(number, 7), number, grad=False)
        run.model.train()
    elif what == "evaluation on rank 0":  # through the module, as one should
        if run.rank == 0:
            with torch.no_grad():
                run.net.eval()(run.inputs(number, 7), run.used(number))
            run.net.train()
    elif what == "skipped batch":
        heads = yield from run.forward(run.inputs(number, 7), number)
        run.loss(heads, number)
    elif what == "state dict":
        run.model.load_state_dict(run.model.state_dict())
    elif what == "assigned state dict":
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(state, assign=True)
        run.new_optimizer()
    elif what == "new optimizer":
        run.new_optimizer()


# What a step does

Kind = Callable[[Run, int], Generator[Event, None, None]]


def plain(run: Run, number: int) -> Generator[Event, None, None]:
    heads = yield from run.forward(run.inputs(number, 5), number)
    yield from run.backward(run.loss(heads, number), f"{number} mean", sync=True)


def first_head_alone(run: Run, number: int) -> Generator[Event, None, None]:
    heads = yield from run.forward(run.inputs(number, 5), number)
    yield from run.backward(run.loss(heads[:1], number), f"{number} mean", sync=True)


def backward_per_head(run: Run, number: int) -> Generator[Event, None, None]:
    heads = yield from run.forward(run.inputs(number, 5), number)
    loss = run.loss(heads[:1], number)
    yield from run.backward(loss, f"{number} first", sync=True, retain_graph=True)
    yield from run.backward(run.loss(heads[-1:], number), f"{number} mean", sync=True)


def same_loss_twice(run: Run, number: int) -> Generator[Event, None, None]:
    heads = yield from run.forward(run.inputs(number, 5), number)
    loss = run.loss(heads, number)
    yield from run.backward(loss, f"{number} first", sync=True, retain_graph=True)
    yield from run.backward(loss, f"{number} mean", sync=True)


def retained(run: Run, number: int) -> Generator[Event, None, None]:
    heads = yield from run.forward(run.inputs(number, 5), number)
    loss = run.loss(heads, number)
    yield from run.backward(loss, f"{number} mean", sync=True, retain_graph=True)


def saliency_before(run: Run, number: int) -> Generator[Event, None, None]:
    x = run.inputs(number, 5).requires_grad_()
    heads = yield from run.forward(x, number)
    torch.autograd.grad(heads[0].sum(), x, retain_graph=True)
    yield from run.backward(run.loss(heads, number), f"{number} mean", sync=True)


def saliency_after(run: Run, number: int) -> Generator[Event, None, None]:
    x = run.inputs(number, 5).requires_grad_()
    heads = yield from run.forward(x, number)
    loss = run.loss(heads, number)
    yield from run.backward(loss, f"{number} mean", sync=True, retain_graph=True)
    torch.autograd.grad(loss, x)


def gradient_penalty(run: Run, number: int) -> Generator[Event, None, None]:
    x = run.inputs(number, 5).requires_grad_()
    heads = yield from run.forward(x, number)
    (slope,) = torch.autograd.grad(heads[0].square().sum(), x, create_graph=True)
    loss = run.loss(heads, number) + slope.square().mean()
    yield from run.backward(loss, f"{number} mean", sync=True)


def create_graph(run: Run, number: int) -> Generator[Event, None, None]:
    heads = yield from run.forward(run.inputs(number, 5), number)
    loss = run.loss(heads, number)
    yield from run.backward(loss, f"{number} mean", sync=True, create_graph=True)


def two_forwards(run: Run, number: int) -> Generator[Event, None, None]:
    first = yield from run.forward(run.inputs(number, 5), number)
    second = yield from run.forward(run.inputs(number, 6), number)
    loss = run.loss(first, number) + run.loss(second, number)
    yield from run.backward(loss, f"{number} mean", sync=True)


def two_forwards_two_backwards(run: Run, number: int) -> Generator[Event, None, None]:
    first = yield from run.forward(run.inputs(number, 5), number)
    second = yield from run.forward(run.inputs(number, 6), number)
    yield from run.backward(run.loss(first, number), f"{number} first", sync=True)
    yield from run.backward(run.loss(second, number), f"{number} mean", sync=True)


def two_passes(run: Run, number: int) -> Generator[Event, None, None]:
    yield from plain(run, number)
    heads = yield from run.forward(run.inputs(number, 6), number)
    yield from run.backward(run.loss(heads, number), f"{number} more", sync=True)


def forward_in_no_sync(run: Run, number: int) -> Generator[Event, None, None]:
    """What forward is in decides: this backward is local."""
    with run.no_sync():
        heads = yield from run.forward(run.inputs(number, 5), number, sync=False)
    yield from run.backward(run.loss(heads, number), f"{number} local", sync=False)
    yield from plain(run, number)


def backward_in_no_sync(run: Run, number: int) -> Generator[Event, None, None]:
    heads = yield from run.forward(run.inputs(number, 5), number)
    with run.no_sync():
        yield from run.backward(run.loss(heads, number), f"{number} mean", sync=True)


def error_in_backward(run: Run, number: int) -> Generator[Event, None, None]:
    """As one out of memory, on all ranks, caught; then the next batch."""
    heads = yield from run.forward(run.inputs(number, 6), number)
    loss = run.loss([heads[0]], number) + run.loss(heads, number) * 0

    def fail(gradient: Tensor) -> None:
        raise MemoryError("out of memory")

    heads[0].register_hook(fail)
    try:
        loss.backward()
    except MemoryError:
        run.optimizer.zero_grad()
    yield from plain(run, number)


KINDS: dict[str, Kind] = {
    "plain": plain,
    "first head alone": first_head_alone,
    "backward per head": backward_per_head,
    "same loss twice": same_loss_twice,
    "retained": retained,
    "saliency before": saliency_before,
    "saliency after": saliency_after,
    "gradient penalty": gradient_penalty,
    "create_graph": create_graph,
    "two forwards": two_forwards,
    "two forwards, two backwards": two_forwards_two_backwards,
    "two passes": two_passes,
    "forward in no_sync": forward_in_no_sync,
    "backward in no_sync": backward_in_no_sync,
    "error in backward": error_in_backward,
}
