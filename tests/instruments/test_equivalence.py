import pytest
import torch
import torch.distributed as dist
from torch import nn

from instruments import equivalence
from instruments.gradients import relative_error
from miniddp import run_ranks

DTYPE = torch.float64


def histories(rank: int) -> tuple[list, list, list]:
    """Averaged, added and left alone."""

    def add(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    averaged = equivalence.train_on_rank("SGD", DTYPE)
    added = equivalence.train_on_rank("SGD", DTYPE, synchronise=add)
    own = equivalence.train_on_rank("SGD", DTYPE, synchronise=lambda model: None)
    return averaged, added, own


def test_only_ranks_that_average_train_as_one_process():
    alone = equivalence.train_alone("SGD", DTYPE)
    assert len(alone) == equivalence.STEPS
    ranks = run_ranks(histories, 2)
    for averaged, added, own in ranks:
        assert max(equivalence.gaps_between(averaged, alone)) < 1e-14
        assert min(equivalence.gaps_between(added, alone)) > 1e-3
        assert min(equivalence.gaps_between(own, alone)) > 1e-3
    assert min(equivalence.gaps_between(ranks[0][2], ranks[1][2])) > 1e-3


def test_a_step_is_that_of_the_optimizer():
    model = equivalence.build(DTYPE)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    step = equivalence.train_alone("SGD", DTYPE)[0] - before.cpu()
    torch.testing.assert_close(step, -0.2 * equivalence.gradient_alone())


@pytest.mark.parametrize(
    ("counts", "reduction", "weighted", "factor"),
    [([12, 12], "mean", False, 1), ([12, 12], "sum", False, 2), ([19, 5], "mean", True, 1)],
)
def test_the_averaged_gradient(counts, reduction, weighted, factor):
    averaged = run_ranks(equivalence.gradient_on_rank, 2, counts, reduction, weighted)[0]
    assert relative_error(factor * averaged, equivalence.gradient_alone(reduction)) < 1e-13


def test_unequal_counts_need_weights():
    averaged = run_ranks(equivalence.gradient_on_rank, 2, [19, 5])[0]
    assert relative_error(averaged, equivalence.gradient_alone()) > 0.05


def test_the_middle_layer_is_in_the_model():
    plain = equivalence.gradient_alone()
    normed = equivalence.gradient_alone(middle=nn.LayerNorm(equivalence.WIDTH))
    assert len(normed) == len(plain) + 2 * equivalence.WIDTH


def test_masks_of_ones_own_even_out_and_equal_ones_do_not():
    def scatters(rank: int) -> tuple[float, float]:
        own_seeds = equivalence.scatter_with_dropout(rank, True, draws=100)
        one_seed = equivalence.scatter_with_dropout(rank, False, draws=100)
        return own_seeds, one_seed

    alone, _ = run_ranks(scatters, 1)[0]
    own_seeds, one_seed = run_ranks(scatters, 2)[0]
    assert own_seeds == pytest.approx(alone, rel=0.15)
    assert one_seed > 1.2 * own_seeds
