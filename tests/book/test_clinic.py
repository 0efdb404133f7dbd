"""The tests that keep the programs of the clinic cured.

Each test has to pass on a cured program, and to fail on the broken one that the chapter shows.
The programs of a case are a file in runs/clinic.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clinic import (
    around,
    branch,
    clip,
    early,
    nan,
    near_misses,
    norm,
    prefix,
    reentrant,
    same,
    stop,
    straggler,
    uneven,
    unfreeze,
)
from instruments.replicas import weights
from instruments.toy import loss_of, own_batches, small_model, train
from miniddp import run_ranks
from miniddp.launch import RanksFailed, RanksTimedOut

ANSWER_SECONDS = 60
"""How long a cured program may take; it needs less than one second, and a loaded machine more."""
HANG_SECONDS = 8
"""After this a broken program hangs."""
Program = Callable[..., Any]


def keeps_cured(cured: Program, *broken: Program) -> Callable[..., Any]:
    """Run a test on a cured program, and on broken ones, where it must fail.

    The test calls `program()`, which gives it one result per rank.
    """
    fails = pytest.mark.xfail(
        strict=True,
        raises=(AssertionError, RanksFailed, RanksTimedOut),
        reason="a broken program: the test has to notice",
    )

    def on_two_ranks(function: Program, timeout: float) -> Program:
        return lambda *args: run_ranks(function, 2, *args, timeout=timeout)

    right = on_two_ranks(cured, ANSWER_SECONDS)
    programs = [pytest.param(right, id=cured.__name__)]
    for function in broken:
        program = on_two_ranks(function, HANG_SECONDS)
        programs.append(pytest.param(program, id=function.__name__, marks=fails))
    return pytest.mark.parametrize("program", programs)


def joined_batches(count: int) -> list[Tensor]:
    """The batches of both ranks, each two joined."""
    pairs = zip(own_batches(0, count), own_batches(1, count), strict=True)
    return [torch.cat(pair) for pair in pairs]


@keeps_cured(
    early.load_after_the_barrier,
    early.load_too_early,
    near_misses.barrier_before_the_save,
    near_misses.save_on_every_rank,
)
def test_every_rank_loads_the_checkpoint_of_rank_0(program, tmp_path):
    first, second = program(str(tmp_path))
    assert torch.equal(first, second)


@keeps_cured(prefix.save_the_module, prefix.save_the_wrapper, prefix.load_what_fits)
def test_the_restored_model_computes_what_the_saved_one_did(program):
    for saved, restored in program():
        assert torch.equal(saved, restored)


@keeps_cured(
    reentrant.checkpoint_not_reentrant,
    reentrant.checkpoint_reentrant,
    near_misses.checkpoint_what_is_detached,
    near_misses.checkpoint_the_first_layer_without_a_graph,
)
def test_checkpointing_does_not_change_the_gradients(program):
    without = run_ranks(reentrant.checkpoint_reentrant, 2, None)
    for gradients, expected in zip(program(), without, strict=True):
        torch.testing.assert_close(gradients, expected)


@keeps_cured(
    branch.evaluate_on_all_ranks,
    branch.evaluate_on_rank_0,
    near_misses.evaluate_on_rank_0_with_company,
    near_misses.evaluate_the_own_batch,
)
def test_every_rank_gets_the_evaluation_of_all_data(program):
    model = small_model()
    train(model, joined_batches(2))
    expected = loss_of(model(joined_batches(1)[0])).item()
    assert program() == pytest.approx([expected, expected])


@keeps_cured(
    uneven.train_joined,
    uneven.train_unevenly,
    near_misses.train_to_the_shortest,
    near_misses.train_the_rest_without_sync,
)
def test_ranks_with_unequal_batches_end_with_equal_weights(program):
    for rank, (batches, spread) in enumerate(program()):
        assert batches == 4 - rank
        assert spread == 0


@keeps_cured(
    stop.stop_together,
    stop.stop_alone,
    near_misses.ask_only_when_done,
    near_misses.wait_before_leaving,
)
def test_all_ranks_stop_after_the_same_step(program):
    first, second = program()
    assert first == second < 40


@keeps_cured(
    same.read_own_part,
    same.read_everything,
    near_misses.shuffle_by_rank,
    near_misses.every_second_of_an_own_order,
)
def test_each_sample_is_read_by_one_rank(program):
    first, second = program()
    assert sorted(first + second) == list(range(same.SAMPLES))


@keeps_cured(
    around.call_the_wrapper,
    around.call_the_module,
    near_misses.copy_the_weights_at_the_end,
    near_misses.call_the_wrapper_without_gradients,
)
def test_each_replica_is_what_one_process_learns_from_all_data(program):
    model = small_model()
    train(model, joined_batches(5))
    for found in program():
        torch.testing.assert_close(found, weights(model))


@keeps_cured(
    unfreeze.wrap_again_after_unfreezing,
    unfreeze.unfreeze_after_wrapping,
    near_misses.find_what_is_unused,
    near_misses.add_up_what_is_unfrozen,
)
def test_the_unfrozen_layer_learns_from_all_data(program):
    model = small_model()
    model[0].requires_grad_(False)
    train(model, joined_batches(2))
    model[0].requires_grad_(True)
    train(model, joined_batches(3))
    for found in program():
        torch.testing.assert_close(found, weights(model))


@keeps_cured(
    clip.synchronise_then_clip,
    clip.clip_then_synchronise,
    near_misses.clip_to_a_share,
    near_misses.clip_each_parameter,
)
def test_the_clipped_gradient_is_that_of_one_process(program):
    expected = clip.clipped_alone()
    for gradient in program():
        torch.testing.assert_close(gradient, expected)


@keeps_cured(
    norm.merge_before_evaluating,
    norm.keep_the_statistics_of_rank_0,
    near_misses.average_mean_and_variance,
    near_misses.average_after_each_step,
)
def test_the_running_statistics_are_those_of_all_data(program):
    for statistics in program():
        mean, variance, normalised_mean, normalised_variance = statistics
        assert mean == pytest.approx(2, abs=0.3)
        assert variance == pytest.approx(5, abs=0.5)
        assert normalised_mean == pytest.approx(0, abs=0.1)
        assert normalised_variance == pytest.approx(1, abs=0.1)


@keeps_cured(
    nan.skip_the_step_together,
    nan.step_with_whatever_comes,
    near_misses.look_at_the_own_loss,
    near_misses.clip_and_step,
)
def test_a_bad_batch_on_one_rank_leaves_the_weights_finite(program):
    assert all(program())


@keeps_cured(
    straggler.shards_dealt_in_turn,
    straggler.shards_in_blocks,
    near_misses.shards_from_both_ends,
    near_misses.blocks_that_are_shuffled,
)
def test_ranks_read_about_as_many_tokens(program):
    tokens = [times["tokens"] for times in program()]
    assert max(tokens) < 1.1 * min(tokens)
