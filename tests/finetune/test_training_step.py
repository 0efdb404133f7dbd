"""A complete step does what one process with the joined batch does, whatever is switched on."""

import contextlib
from dataclasses import replace

import pytest
import torch

from finetune.options import Options
from finetune.train import train
from finetune.training_step import WRAPPERS, build_optimizer, train_step
from miniddp.accumulation import mean_weights
from miniddp.launch import RanksFailed
from miniddp.naive import SimpleDDP
from miniddp.process import device

from ..package.ranks import run
from ..parity import row
from .training_cases import SHORT, build_regression, flat, learn, regression

DDPS = ["simple", "miniddp", "torch"]
STEPS = [range(0, 24), range(24, 48), range(40, 64)]


def cut(samples, rank: int, world_size: int, count: int) -> list[dict[str, torch.Tensor]]:
    """A rank's samples of a step, in so many micro-batches."""
    mine = samples[rank::world_size]
    size = len(mine) // count
    return [regression(mine[i * size : (i + 1) * size]) for i in range(count)]


def alone(**options) -> torch.Tensor:
    steps = [[regression(samples)] for samples in STEPS]
    return run(lambda rank: learn(steps, **options), 1)[0]


@pytest.mark.parametrize("ddp", DDPS)
def test_any_wrapper_and_any_number_of_micro_batches_learn_what_one_process_learns(ddp):
    def learn_in_parts(rank):
        return [
            learn([cut(samples, rank, 2, count) for samples in STEPS], ddp)
            for count in (1, 2, 3, 4)
        ]

    expected = alone()
    assert (expected - flat(build_regression())).abs().max() > 0.1
    for found in run(learn_in_parts, 2):
        for weights in found:
            torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ddp", DDPS)
def test_only_the_last_micro_batch_synchronises_in_forward_and_in_backward(ddp):
    def watch(rank):
        module = build_regression()
        model, optimizer = WRAPPERS[ddp](module), torch.optim.SGD(module.parameters())
        seen = []

        def note(phase):
            seen.append(
                (phase, model.do_sync if ddp == "simple" else model.require_backward_grad_sync)
            )

        module.register_forward_hook(lambda *_: note("forward"))
        module.layers[0].weight.register_hook(lambda _: note("backward"))
        train_step(model, optimizer, cut(STEPS[0], rank, 2, 3))
        return seen

    off = [("forward", False), ("backward", False)]
    assert run(watch, 2) == [[*off, *off, ("forward", True), ("backward", True)]] * 2


@pytest.mark.parametrize("ddp", DDPS)
def test_the_loss_of_a_step_is_the_mean_over_its_micro_batches(ddp):
    def losses(rank):
        module = build_regression()
        model, optimizer = WRAPPERS[ddp](module), torch.optim.SGD(module.parameters(), lr=0.1)
        before = build_regression()(**regression(STEPS[0][rank::2])).loss.item()
        return train_step(model, optimizer, cut(STEPS[0], rank, 2, 3)).item(), before

    for found, expected in run(losses, 2):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ddp", DDPS)
def test_clipping_bounds_the_norm_of_the_averaged_gradient(ddp):
    def clipped(rank):
        return [
            learn([cut(STEPS[0], rank, 2, 2)], ddp, lr=1.0, clip=clip) for clip in (0.01, 1e6, None)
        ]

    before = flat(build_regression())
    (expected,) = run(lambda rank: learn([[regression(STEPS[0])]], lr=1.0), 1)
    whole = expected - before
    for small, large, unclipped in run(clipped, 2):
        torch.testing.assert_close(small - before, 0.01 * whole / whole.norm(), atol=1e-6, rtol=0)
        torch.testing.assert_close(large, expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(large, unclipped)


@pytest.mark.parametrize("ddp", DDPS)
def test_bf16_computes_in_half_precision_and_keeps_the_weights_in_float32(ddp):
    def learn_in_bf16(rank):
        module = build_regression()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = WRAPPERS[ddp](module)
        loss = train_step(model, optimizer, cut(STEPS[0], rank, 2, 1), amp="bf16")
        return module.last_output.dtype, loss.dtype, flat(module), loss.item()

    (expected,) = run(lambda rank: learn([[regression(STEPS[0])]]), 1)
    results = run(learn_in_bf16, 2)
    assert torch.equal(results[0][2], results[1][2])
    for output_dtype, loss_dtype, weights, _ in results:
        assert (output_dtype, loss_dtype) == (torch.bfloat16, torch.float32)
        assert weights.dtype == torch.float32
        assert not torch.equal(weights, expected)
        torch.testing.assert_close(weights, expected, atol=0.02, rtol=0.05)


@pytest.mark.parametrize("ddp", DDPS)
def test_an_overflow_on_one_rank_skips_the_scaled_step_on_all(ddp):
    """fp16's loss scaling, here on a CPU: with clipping, so that gradients are unscaled once."""

    def scaled(rank):
        module = build_regression()
        model, optimizer = WRAPPERS[ddp](module), torch.optim.SGD(module.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler(device().type, init_scale=1024.0)
        train_step(model, optimizer, cut(STEPS[0], rank, 2, 2), scaler=scaler, clip=0.01)
        after_one = flat(module)
        batch = regression(STEPS[1][rank::2])
        if rank == 1:
            batch["labels"] = batch["labels"] * 1e38
        train_step(model, optimizer, [batch], scaler=scaler, clip=0.01)
        return after_one, flat(module), scaler.get_scale()

    before = flat(build_regression())
    for after_one, after_overflow, scale in run(scaled, 2):
        assert (after_one - before).norm().item() == pytest.approx(0.01, rel=1e-4)
        assert torch.equal(after_one, after_overflow)
        assert scale == 512


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine computes in fp16")
def test_fp16_without_a_gpu_is_an_error_on_every_rank():
    with pytest.raises(RanksFailed) as caught:
        run(lambda rank: train(replace(SHORT, amp="fp16", data_dir="nowhere")), 2)
    assert set(caught.value.tracebacks) == {0, 1}
    for text in caught.value.tracebacks.values():
        assert "TrainingError: --amp fp16 needs a GPU: use bf16 or off" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.5] * 5),
        ({"warmup": 4}, [0, 0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_the_learning_rate_is_warmed_up(changes, expected):
    options = replace(Options(lr=0.5), **changes)

    def rates(rank):
        optimizer, scheduler = build_optimizer(build_regression(), options)
        found = []
        for _ in range(5):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    for found in run(rates, 2):
        assert found == pytest.approx(expected)


def test_an_exception_within_a_micro_batch_leaves_synchronisation_on():
    def fail(rank):
        module = build_regression()
        model, optimizer = SimpleDDP(module), torch.optim.SGD(module.parameters())
        with contextlib.suppress(TypeError):
            train_step(model, optimizer, [{"no": torch.zeros(1)}, regression(range(4))])
        return model.do_sync

    assert run(fail, 1) == [True]


PARTS = [[[0, 1, 2, 3, 4], [5]], [[6, 7], [8, 9, 10]]]
"""The samples of each micro-batch of each rank: 5 + 1 and 2 + 3."""


@row(
    "parts",
    {"rtol": 1e-5, "atol": 1e-6},
    says="Micro-batches of unequal size, each loss "
    "weighted by its share of all samples, equal one process with all samples.",
)
@pytest.mark.parametrize("ddp", DDPS)
def test_weighted_micro_batches_of_unequal_size_learn_what_one_process_learns(ddp):
    def learn_parts(rank):
        micro_batches = [regression(part) for part in PARTS[rank]]
        weights = mean_weights([len(part) for part in PARTS[rank]])
        return learn([micro_batches], ddp, weights), learn([micro_batches], ddp)

    joined = [sample for parts in PARTS for part in parts for sample in part]
    (expected,) = run(lambda rank: learn([[regression(joined)]]), 1)
    for weighted, unweighted in run(learn_parts, 2):
        torch.testing.assert_close(weighted, expected, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(unweighted, expected, atol=1e-3)
