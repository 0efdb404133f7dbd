from pathlib import Path

import torch

from instruments.first_batch import gradients, gradients_all_in_float64
from instruments.gradients import largest_difference, relative_error
from miniddp import run_ranks

STAGE = str(Path(__file__).resolve().parents[2] / "stages/1_average.py")


def test_three_ranks_have_one_process_gradient_as_far_as_all_computes_in_float64():
    in_float32 = run_ranks(gradients, 3, STAGE)[0]
    weights_only = run_ranks(gradients, 3, STAGE, torch.float64)[0]
    everything = run_ranks(gradients_all_in_float64, 3, STAGE)[0]
    off = [largest_difference(*found) for found in (in_float32, weights_only, everything)]
    assert 0 < off[2] < 1e-14 < off[1] < 1e-7
    assert off[0] > off[1]
    assert relative_error(everything[1], in_float32[1]) < 1e-4, "the same model"


def test_five_ranks_need_weights():
    assert largest_difference(*run_ranks(gradients, 5, STAGE)[0]) > 1e-4
    weighted = run_ranks(gradients, 5, STAGE, torch.float32, True)[0]
    assert largest_difference(*weighted) < 1e-6
