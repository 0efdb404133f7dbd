from instruments.drift import MOMENTS, VALUES, draw_in_four_ways, running_means, train_from
from miniddp import run_ranks


def test_from_equal_weights_ranks_learn_and_from_others_the_gap_stays():
    equal = run_ranks(train_from, 2, [42, 42], 50)
    assert all(step.gap == 0 for steps in equal for step in steps)
    assert all(steps[-1].loss < 1e-4 < 1 < steps[0].loss for steps in equal)
    assert equal[0][0].loss != equal[1][0].loss, "each rank has points of its own"

    different = run_ranks(train_from, 2, [42, 43], 50)
    assert all(step.gap == 0 for step in different[0]), "rank 0 is compared with itself"
    gaps = [step.gap for step in different[1]]
    assert gaps[0] > 0.1
    assert max(gaps) - min(gaps) < 1e-6
    assert all(steps[-1].loss > 0.01 for steps in different)
    gradients = [step.mean_gradient for step in different[1]]
    assert gradients == [step.mean_gradient for step in different[0]]
    assert gradients[-1] < 0.01 * gradients[0]


def test_only_two_ways_to_seed_give_equal_weights_and_masks_of_ones_own():
    first, second = run_ranks(draw_in_four_ways, 2)
    equal = {
        name: (first[name].weight == second[name].weight, first[name].kept == second[name].kept)
        for name in first
    }
    assert equal == {
        "one seed for all": (True, True),
        "a seed per rank": (False, False),
        "one seed, then a seed per rank": (True, False),
        "a seed per rank, then broadcast": (True, False),
    }
    assert all(len(drawn.kept) == VALUES for drawn in first.values())


def test_each_forward_starts_from_the_buffers_of_rank_0():
    first, second = run_ranks(running_means, 2)
    assert len(first) == len(second) == len(MOMENTS)
    equal = [one == other for one, other in zip(first, second, strict=True)]
    assert equal == [True, False, True, False]
    assert second[2] == first[1] != second[1]
