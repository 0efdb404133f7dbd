"""When buckets leave, what they hold, and what hooks make of them: both classes, by hand."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torch

from instruments import awkward_models, bucket_probe, hook_error
from instruments.awkward_models import listed_backwards, two_heads
from instruments.bucket_probe import Departure, leaves_after, ready_order
from miniddp import DistributedDataParallel, run_ranks

CLASSES = {"torch": Torch, "miniddp": DistributedDataParallel}
LAYER = 256 * 256 * 4
TWO_LAYERS_MB = 0.5


def test_a_bucket_leaves_with_its_last_gradient_and_in_its_turn() -> None:
    ready = [3, 2, 0, 1]
    assert leaves_after([[3, 2], [1, 0]], ready) == [2, 4]
    assert leaves_after([[1], [3], [2], [0]], ready) == [4, 4, 4, 4]
    assert leaves_after([[3], [2], [0, 1]], ready) == [1, 2, 4]


def test_the_order_is_that_of_backward_not_of_the_list() -> None:
    assert ready_order(listed_backwards(), awkward_models.loss_of) == list(range(8))
    straight = nn.Sequential(*awkward_models.layers(3))
    assert ready_order(straight, awkward_models.loss_of) == [2, 1, 0]


def departures(rank: int) -> dict[tuple[str, str], list[list[Departure]]]:
    found = {}
    for kind, wrap in CLASSES.items():
        capped = partial(wrap, bucket_cap_mb=TWO_LAYERS_MB)
        searching = partial(capped, find_unused_parameters=True)
        for name, module, ddp in (
            ("listed backwards", listed_backwards(), capped),
            ("frozen", two_heads(frozen=True), capped),
            ("unused", two_heads(frozen=False), searching),
        ):
            loss_of = awkward_models.loss_of
            found[name, kind] = bucket_probe.departures_by_step(module, ddp, loss_of, 3)
    return found


def moments(departures: list[Departure]) -> list[int]:
    return [departure.gradients for departure in departures]


def test_buckets_leave_at_the_same_moments_in_both_classes() -> None:
    found = run_ranks(departures, 2)[0]
    for (name, _), steps in found.items():
        assert steps == found[name, "torch"], name
    first, *later = found["listed backwards", "miniddp"]
    assert first == [Departure(8 * LAYER, 8)], "one bucket, at the end"
    assert later == [[Departure(2 * LAYER, count) for count in (2, 4, 6, 8)]] * 2
    assert moments(found["frozen", "miniddp"][-1]) == [2, 4, 6, 7]
    unused = found["unused", "miniddp"][-1]
    assert moments(unused) == [1, 3, 5, 7], "none waits for what will not come"
    assert sum(departure.num_bytes for departure in unused) == 8 * LAYER


def held(rank: int, kind: str) -> tuple[int, int]:
    twice, once = (
        bucket_probe.bytes_held(
            CLASSES[kind](listed_backwards(), gradient_as_bucket_view=view), awkward_models.loss_of
        )
        for view in (False, True)
    )
    return twice, once


@pytest.mark.parametrize("kind", CLASSES)
def test_a_gradient_that_is_a_view_is_held_once(kind: str) -> None:
    assert run_ranks(held, 2, kind)[0] == (16 * LAYER, 8 * LAYER)


def noticed(rank: int) -> dict[str, awkward_models.Notice]:
    model = partial(two_heads, frozen=False)
    return {
        "torch": awkward_models.notice(Torch(model())),
        "miniddp": awkward_models.notice(DistributedDataParallel(model())),
        "checked": awkward_models.notice(DistributedDataParallel(model(), check_reduction=True)),
        "frozen": awkward_models.notice(DistributedDataParallel(two_heads(frozen=True))),
    }


def test_when_a_class_notices_a_head_that_is_not_used() -> None:
    for on_rank in run_ranks(noticed, 2):
        assert on_rank == {
            "torch": ("the next forward", False),
            "miniddp": ("the next forward", True),
            "checked": ("this backward", True),
            "frozen": ("no", False),
        }


# Hooks


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def tried(rank: int) -> dict[str, hook_error.Trial]:
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    return hook_error.try_hooks(small, lambda model: model(inputs).square().mean(), 8)


def test_what_hooks_send_and_how_far_off_they_are() -> None:
    first, second = run_ranks(tried, 2)
    whole = 4 * (64 * 64 + 64)
    assert [first[name].num_bytes for name in ("allreduce", "fp16", "bf16", "noop")] == [
        whole,
        whole // 2,
        whole // 2,
        0,
    ]
    assert first["allreduce"].once < 1e-6 < first["fp16"].once < first["bf16"].once < 1e-2
    assert first["PowerSGD 1"].num_bytes < first["PowerSGD 8"].num_bytes < whole
    assert first["PowerSGD 1"].once > first["PowerSGD 8"].once
    assert first["PowerSGD 1"].in_mean < first["PowerSGD 1"].once, "what is left out comes later"
    assert first["noop"].once > 0.1
    assert {name for name, trial in first.items() if not trial.equal} == {"noop"}
    assert first["bf16"] == second["bf16"]
