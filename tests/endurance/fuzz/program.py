"""A program, built from its spec: a model, a wrapper and a training loop.

`program` is a generator, so that one process can run all ranks side by side: it stops before each
forward pass, where a wrapper copies buffers, and after each backward pass that averages. What it
returns is its trace: gradients and weights, by name, after each backward pass and each step.
"""

from collections.abc import Callable, Generator

import torch
from torch import nn

from .loop import KINDS, Event, Run, Trace, between
from .model import Net, Spec, Wrap, add_hooks, alter, wrapped


def program(
    spec: Spec, rank: int, wrap: Wrap, comm_hook: Callable[[nn.Module], None]
) -> Generator[Event, None, Trace]:
    torch.manual_seed(spec["seed"] + (rank if spec.get("start") == "different" else 0))
    net = Net(spec, rank)
    alter(net, spec, rank, "before")
    add_hooks(net, spec, "before")
    model = wrapped(net, spec, wrap)
    if spec.get("wrap") == "deep copy":
        net = getattr(model, "module", model)
    yield "start", net, True
    comm_hook(model)
    alter(net, spec, rank, "after")
    add_hooks(net, spec, "after")
    run = Run(spec, rank, model, net)
    run.note("start", gradients=False)
    for number, step in enumerate(spec["steps"]):
        yield from one_step(run, number, step)
    yield from run.forward(run.inputs(9, 0), 0)  # which sees what the last backward left out
    run.note("end", gradients=False)
    return run.trace


def one_step(run: Run, number: int, step: Spec) -> Generator[Event, None, None]:
    spec = run.spec
    if step.get("before"):
        yield from between(run, number, step["before"])
    if (zero := step.get("zero", "none")) != "never":
        run.optimizer.zero_grad(set_to_none=zero == "none")
    for micro in range(step.get("micro", 0)):
        with run.no_sync():
            heads = yield from run.forward(run.inputs(number, micro), number, sync=False)
            yield from run.backward(run.loss(heads, number), f"{number} local", sync=False)
    yield from KINDS[step.get("kind", "plain")](run, number)
    if spec.get("scaler"):
        run.scaler.unscale_(run.optimizer)
    if spec.get("clip"):
        parameters = [p for p in run.net.parameters() if p.grad is None or not p.is_complex()]
        nn.utils.clip_grad_norm_(parameters, 0.5)
    if spec.get("scaler"):
        run.scaler.step(run.optimizer)
        run.scaler.update()
    else:
        run.optimizer.step()
    run.note(f"{number} step", gradients=False)
