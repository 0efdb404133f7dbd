"""Activations by the formula, and what autograd keeps of the real model."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from instruments.memory import (
    LOGIT_BYTES,
    activation_bytes,
    bucket_bytes,
    cast_bytes,
    logit_bytes,
)
from instruments.tensors import Llama, llama

LIBRARY: Any = transformers
TOKENS = 24
WORDS = 300
SHAPES = {
    "a small one": Llama(192, 512, 2, 6, 2, WORDS),
    "layers of SmolLM2-135M": Llama(576, 1536, 2, 9, 3, WORDS),
    "layers of SmolLM2-1.7B": Llama(2048, 8192, 1, 32, 32, WORDS),
}


def kept(config: Llama, precision: str) -> tuple[dict[int, Tensor], nn.Module]:
    """Everything that autograd saves in forward, once each, without parameters."""
    numbers = config._asdict()
    tied = numbers.pop("tied")
    options = LIBRARY.LlamaConfig(**numbers, tie_word_embeddings=tied, use_cache=False)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.device("meta"):
        model = LIBRARY.LlamaForCausalLM(options).to(dtype)
    model.to_empty(device="cpu")  # no value is looked at
    model.tie_weights()
    persistent = [*model.parameters(), *model.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in persistent}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in known:
            found[place] = tensor
        return tensor

    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    casts = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casts:
        model(input_ids=tokens, labels=tokens)
    return found, model


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_formula_counts_what_autograd_keeps(shape: str, precision: str) -> None:
    config = SHAPES[shape]
    found, model = kept(config, precision)
    count = sum(parameter.numel() for parameter in model.parameters())
    expected = activation_bytes(config, TOKENS, precision)
    expected += 4 * TOKENS * WORDS  # the logarithmic softmax
    if precision == "autocast":
        expected += cast_bytes(config, count)
    width = config.hidden_size // config.num_attention_heads
    rotary = 2 * TOKENS * width * (2 if precision == "bf16" else 4)
    held = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
    assert held == pytest.approx(expected + rotary, abs=12 * TOKENS)


def test_the_loss_holds_three_times_the_logits_when_backward_begins() -> None:
    """Logits, the logarithmic softmax that is kept, and the gradient of the logits."""
    logits = torch.zeros(TOKENS, WORDS, requires_grad=True)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks:
        loss = nn.functional.cross_entropy(logits, torch.zeros(TOKENS, dtype=torch.long))
    loss.backward()
    assert logits.grad is not None
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [logits, logits.grad, *saved]
        if tensor.numel() >= TOKENS * WORDS
    }
    assert sum(held.values()) == logit_bytes(WORDS, TOKENS) == LOGIT_BYTES * TOKENS * WORDS


def test_buckets_hold_the_gradients_again_unless_they_are_views() -> None:
    assert bucket_bytes(10, 4, views=False) == 40
    assert bucket_bytes(10, 4, views=True) == 0


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision must be one of fp32, autocast, bf16, not"):
        activation_bytes(SHAPES["a small one"], 1, "fp8")


def test_casts_are_those_of_the_matrices() -> None:
    config = SHAPES["a small one"]
    model = llama("", config)
    matrices = [parameter for parameter in model.parameters if len(parameter.shape) == 2]
    assert cast_bytes(config, model.elements) == 2 * sum(each.elements for each in matrices)
