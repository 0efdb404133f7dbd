from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from instruments.accumulation import (
    accumulate,
    accumulate_with,
    gradient_of_all_tokens,
    tokens_of,
    weighted_gradient,
)
from instruments.gradients import relative_error
from miniddp import run_ranks, set_seed


def always(i: int) -> bool:
    return True


def never(i: int) -> bool:
    return False


def is_last(i: int) -> bool:
    return i % 2 == 1


def test_a_step_holds_the_micro_batches_since_the_last_one():
    found = run_ranks(accumulate, 2, 4, is_last, is_last)
    assert found == [[[2, 2, 0, 0], [0, 0, 2, 2]]] * 2
    assert found.outputs == ["after 1: 2 2 · ·\nafter 3: · · 2 2\n"] * 2


def test_what_is_not_synchronised_is_a_ranks_own():
    found = run_ranks(accumulate, 2, 2, never, is_last)
    assert found == [[[1, 1]], [[3, 3]]]


def test_what_no_step_took_is_left():
    found = run_ranks(accumulate, 2, 3, always, is_last)
    assert found.outputs == ["after 1: 2 2 ·\nleft:    · · 2\n"] * 2


def test_a_hook_in_place_of_ddp():
    def install(weight: nn.Parameter) -> None:
        def hook(parameter: nn.Parameter) -> None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)

        weight.register_post_accumulate_grad_hook(hook)

    assert run_ranks(accumulate_with, 2, 2, install, is_last) == [[[2, 2]]] * 2
    assert run_ranks(accumulate_with, 2, 2, lambda _: None, is_last) == [[[1, 1]], [[3, 3]]]


class NextToken(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        set_seed(0)
        self.logits = nn.Embedding(5, 5, dtype=torch.float64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.logits(input_ids[:, :-1]).flatten(0, 1)
        return SimpleNamespace(loss=cross_entropy(logits, labels[:, 1:].flatten()))


def batches_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(5, (2, length + rank), generator=generator) for length in (3, 9)]


def errors(rank: int) -> tuple[float, float]:
    """With weights by tokens and with equal ones."""
    everything = gradient_of_all_tokens(NextToken(), [*batches_of(0), *batches_of(1)])
    counts = [tokens_of(batch) for batch in batches_of(rank)]
    total = sum(tokens_of(batch) for each in range(2) for batch in batches_of(each))
    by_tokens = [2 * count / total for count in counts]
    return tuple(
        relative_error(weighted_gradient(NextToken(), batches_of(rank), weights), everything)
        for weights in (by_tokens, [0.5, 0.5])
    )


def test_every_token_counts_alike_only_if_the_losses_are_weighed_by_tokens():
    assert tokens_of(torch.zeros(2, 9)) == 16
    for by_tokens, equal in run_ranks(errors, 2):
        assert by_tokens < 1e-12 < 0.01 < equal


def test_all_tokens_in_one_batch_have_the_gradient_of_its_mean():
    batches = [torch.randint(5, (2, 7)), torch.randint(5, (4, 7))]
    apart = gradient_of_all_tokens(NextToken(), batches)
    together = gradient_of_all_tokens(NextToken(), [torch.cat(batches)])
    assert relative_error(apart, together) == pytest.approx(0, abs=1e-12)
