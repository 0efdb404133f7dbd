import torch

from instruments.toy import TwoHeads


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
