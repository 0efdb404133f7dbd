import torch

from instruments.missing import TwoHeads, step_with_simple_ddp, two_steps_with_torch
from miniddp import run_ranks


def test_only_the_heads_that_forward_names_get_gradients():
    inputs = torch.ones(2, 4)
    one, both = TwoHeads(), TwoHeads()
    assert torch.equal(one.body.weight, both.body.weight)
    one(inputs, ["left"]).backward()
    both(inputs, ["left", "right"]).backward()
    assert one.right.weight.grad is None
    assert torch.equal(one.left.weight.grad, both.left.weight.grad)
    assert both.right.weight.grad is not None
    assert not torch.equal(one.body.weight.grad, both.body.weight.grad)


def test_simple_ddp_raises_on_all_ranks_only_if_the_ranks_differ():
    assert run_ranks(step_with_simple_ddp, 2, [["left"], ["left"]]) == ["", ""]
    errors = run_ranks(step_with_simple_ddp, 2, [["left", "right"], ["right"]])
    assert errors[0] == errors[1]
    assert "'left.weight' has a gradient on 1 of 2 ranks" in errors[0]


def test_torchs_ddp_averages_only_if_all_is_used():
    used = run_ranks(two_steps_with_torch, 2, [["left", "right"]] * 2)
    assert used[0] == used[1]
    assert all("step 1: backward passes" in text for text in used.outputs)
    missed = run_ranks(two_steps_with_torch, 2, [["left"], ["right"]])
    assert missed[0] != missed[1]
    assert all("step 1: RuntimeError" in text for text in missed.outputs)
