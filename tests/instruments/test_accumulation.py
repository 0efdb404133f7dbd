import torch.distributed as dist
from torch import nn

from instruments.accumulation import accumulate, accumulate_with
from miniddp import run_ranks


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
