"""The trainer's lines that only run on a GPU, run here with stand-ins for `torch.cuda`."""

import pytest
import torch

from finetune.checkpoint import random_state, set_random_state
from finetune.training_step import check_amp

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_the_random_state_holds_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpu = torch.arange(3)
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: of_gpu)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    set_random_state(random_state())
    assert len(restored) == 1
    assert restored[0] is of_gpu


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_without_bf16_is_told_before_training(
    monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    check_amp("fp16")
    if supported:
        check_amp("bf16")
        return
    with pytest.raises(ValueError, match="this GPU has none, use fp16 or off"):
        check_amp("bf16")
