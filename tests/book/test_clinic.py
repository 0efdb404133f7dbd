"""The tests that keep the programs of the clinic cured.

Each test has to pass on a cured program, and to fail on the broken one that the chapter shows.
Programs come from runs/14-clinic.py: its functions, without what the run does with them.
"""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch

from miniddp import run_ranks
from miniddp.launch import RanksFailed, RanksTimedOut

RUN = Path(__file__).parents[2] / "runs" / "14-clinic.py"
ANSWER_SECONDS = 60
"""How long a cured program may take; it needs less than one second, and a loaded machine more."""
HANG_SECONDS = 8
"""After this a broken program hangs."""


def definitions_of(file: Path) -> ModuleType:
    """The imports, functions, classes and constants of a run."""
    kept = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, kept)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    module = ModuleType("clinic")
    module.__file__ = str(file)
    sys.modules["clinic"] = module
    cloudpickle.register_pickle_by_value(module)  # no rank could import it
    exec(compile(tree, str(file), "exec"), vars(module))
    return module


clinic = definitions_of(RUN)


def keeps_cured(cured: str, *broken: str, ranks: int = 2) -> Callable[..., Any]:
    """Run a test on a cured program, and on broken ones, where it must fail.

    The test calls `program()`, which gives it one result per rank.
    """
    fails = pytest.mark.xfail(
        strict=True,
        raises=(AssertionError, RanksFailed, RanksTimedOut),
        reason="a broken program: the test has to notice",
    )

    def runner(name: str, timeout: float) -> Callable[..., Any]:
        function = getattr(clinic, name)
        return lambda *args: run_ranks(function, ranks, *args, timeout=timeout)

    programs = [pytest.param(runner(cured, ANSWER_SECONDS), id=cured)]
    for name in broken:
        programs.append(pytest.param(runner(name, HANG_SECONDS), id=name, marks=fails))
    return pytest.mark.parametrize("program", programs)


@keeps_cured("load_after_the_barrier", "load_too_early")
def test_every_rank_loads_the_checkpoint_of_rank_0(program, tmp_path):
    first, second = program(str(tmp_path))
    assert torch.equal(first, second)


@keeps_cured("save_the_module", "save_the_wrapper", "load_what_fits")
def test_the_restored_model_computes_what_the_saved_one_did(program):
    for saved, restored in program():
        assert torch.equal(saved, restored)


@keeps_cured("checkpoint_not_reentrant", "checkpoint_reentrant")
def test_checkpointing_does_not_change_the_gradients(program):
    without = run_ranks(clinic.checkpoint_reentrant, 2, None)
    for gradients, expected in zip(program(), without, strict=True):
        torch.testing.assert_close(gradients, expected)


@keeps_cured("evaluate_on_all_ranks", "evaluate_on_rank_0")
def test_every_rank_gets_the_same_evaluation(program):
    first, second = program()
    assert first == second


@keeps_cured("train_joined", "train_unevenly")
def test_ranks_with_unequal_batches_end_with_equal_weights(program):
    for rank, (batches, spread) in enumerate(program()):
        assert batches == 4 - rank
        assert spread == 0


@keeps_cured("stop_together", "stop_alone")
def test_all_ranks_stop_after_the_same_step(program):
    first, second = program()
    assert first == second < 40


@keeps_cured("read_own_part", "read_everything")
def test_each_sample_is_read_by_one_rank(program):
    first, second = program()
    assert sorted(first + second) == list(range(clinic.SAMPLES))


@keeps_cured("call_the_wrapper", "call_the_module")
def test_replicas_are_equal_after_training(program):
    assert set(program()) == {0}


@keeps_cured("wrap_again_after_unfreezing", "unfreeze_after_wrapping")
def test_replicas_are_equal_after_unfreezing(program):
    assert set(program()) == {0}


@keeps_cured("synchronise_then_clip", "clip_then_synchronise")
def test_the_clipped_gradient_is_that_of_one_process(program):
    expected = clinic.clipped_alone()
    for gradient in program():
        torch.testing.assert_close(gradient, expected)


@keeps_cured("average_the_statistics", "keep_the_statistics_of_rank_0")
def test_the_running_mean_is_that_of_all_data(program):
    for running_mean, normalised in program():
        assert running_mean == pytest.approx(2, abs=0.3)
        assert normalised == pytest.approx(0, abs=0.3)


@keeps_cured("skip_the_step_together", "step_with_whatever_comes")
def test_a_bad_batch_on_one_rank_leaves_the_weights_finite(program):
    assert all(program())


@keeps_cured("shards_dealt_in_turn", "shards_in_blocks")
def test_ranks_read_about_as_many_tokens(program):
    tokens = [each["tokens"] for each in program()]
    assert max(tokens) < 1.1 * min(tokens)
