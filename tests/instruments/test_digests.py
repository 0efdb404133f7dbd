import copy

import pytest
import torch

from instruments.digests import digest_of


def state() -> dict:
    parameters = {"weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    return {"model": parameters, "steps": [1, 2], "name": "step"}


def change_a_bit(changed: dict) -> None:
    changed["model"]["weight"].view(torch.int32)[0] ^= 1


def change_the_shape(changed: dict) -> None:
    changed["model"]["weight"] = changed["model"]["weight"].view(2, 2)


def change_the_type(changed: dict) -> None:
    changed["model"]["weight"] = changed["model"]["weight"].view(torch.int32)


def change_a_number(changed: dict) -> None:
    changed["steps"][1] = 3


def change_a_name(changed: dict) -> None:
    changed["model"] = {"bias": changed["model"]["weight"]}


def test_equal_states_have_one_digest():
    assert digest_of(state()) == digest_of(copy.deepcopy(state()))


@pytest.mark.parametrize(
    "change", [change_a_bit, change_the_shape, change_the_type, change_a_number, change_a_name]
)
def test_any_change_is_seen(change):
    changed = state()
    change(changed)
    assert digest_of(changed) != digest_of(state())
