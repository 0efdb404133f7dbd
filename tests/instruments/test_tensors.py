"""Models as lists of tensors, against the real ones, torch's buckets and a published trace."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from finetune.model import build_model
from instruments.simulator import buckets
from instruments.tensors import (
    MODELS,
    MOST_TENSORS,
    SMOLLM2_1_7B,
    SMOLLM2_360M,
    Llama,
    compute_seconds,
    layers,
    parse,
)
from miniddp.bucket import MIB

LIBRARY: Any = transformers  # its types know neither options nor classes well


def llama(config: Llama) -> nn.Module:
    numbers = config._asdict()
    tied = numbers.pop("tied")
    return LIBRARY.LlamaForCausalLM(LIBRARY.LlamaConfig(**numbers, tie_word_embeddings=tied))


BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
REAL = {
    "vit-b-16": lambda: LIBRARY.ViTForImageClassification(LIBRARY.ViTConfig(num_labels=1000)),
    "bert-large": lambda: LIBRARY.BertForPreTraining(LIBRARY.BertConfig(**BERT_LARGE)),
    "gpt-2": lambda: LIBRARY.GPT2LMHeadModel(LIBRARY.GPT2Config()),
    "smollm2-135m": lambda: llama(Llama(576, 1536, 30, 9, 3, 49152)),
    "smollm2-360m": lambda: llama(SMOLLM2_360M),
    "smollm2-360m-classifier": lambda: build_model("360m"),
    "smollm2-1.7b": lambda: llama(SMOLLM2_1_7B),
    "llama-3-8b": lambda: llama(Llama(4096, 14336, 32, 32, 8, 128256, tied=False)),
}


@pytest.mark.parametrize("name", REAL)
def test_the_tensors_are_those_of_the_real_model(name: str) -> None:
    with torch.device("meta"):
        real = REAL[name]()
    shapes = [tuple(parameter.shape) for parameter in real.parameters()]
    assert [parameter.shape for parameter in MODELS[name].parameters] == shapes


def test_resnet_has_the_tensors_of_the_real_one_in_the_order_of_torchvision() -> None:
    """transformers registers a shortcut before its block, torchvision after it."""
    with torch.device("meta"):
        real = LIBRARY.ResNetForImageClassification(LIBRARY.ResNetConfig(num_labels=1000))
    shapes = sorted(tuple(parameter.shape) for parameter in real.parameters())
    model = MODELS["resnet-50"]
    assert sorted(parameter.shape for parameter in model.parameters) == shapes
    assert len(REAL) + 1 == len(MODELS)


def test_the_messages_of_a_published_trace_are_planned() -> None:
    """What NCCL was handed in a step of ResNet-50 on two A100s, with torch's own DDP."""
    made = layers(MODELS["resnet-50"], 1.0)
    plan = buckets(made)
    elements = [sum(made[i].gradient_bytes[0] for i in bucket) // 4 for bucket in plan]
    assert elements == [2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040]


@pytest.mark.parametrize("caps", [(1, 25), (25, 25), (100, 100)])
@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_those_of_torch(name: str, caps: tuple[int, int]) -> None:
    made = layers(MODELS[name], 1.0)
    sizes = [size for layer in made for size in layer.gradient_bytes]
    first_cap, cap = (MIB * number for number in caps)
    last_first = [torch.empty(size // 4, device="meta") for size in reversed(sizes)]
    assigned, _ = dist._compute_bucket_assignment_by_size(last_first, [first_cap, cap])
    expected = [[len(sizes) - 1 - i for i in bucket] for bucket in assigned]
    assert buckets(made, cap, first_cap) == expected


def test_the_embedding_of_smollm2_is_a_bucket_by_itself_and_leaves_last() -> None:
    made = layers(MODELS["smollm2-1.7b"], 1.0)
    plan = buckets(made)
    assert len(plan) == 121
    assert plan[-1] == [0]
    assert made[0].gradient_bytes == [384 * MIB]


def test_multiplications_are_those_that_others_count() -> None:
    """torchvision's GFLOPS of the classifiers; all weights but looked-up ones of the others."""
    assert MODELS["resnet-50"].products == pytest.approx(4.09e9, rel=0.002)
    attention = 12 * 2 * 197**2 * 768
    assert MODELS["vit-b-16"].products + attention == pytest.approx(17.56e9, rel=0.003)
    assert MODELS["smollm2-1.7b"].products == pytest.approx(1.711e9, rel=0.001)
    untied = MODELS["llama-3-8b"]
    assert untied.products == pytest.approx(untied.elements - 128256 * 4096, rel=0.001)


@pytest.mark.parametrize("name", MODELS)
def test_compute_is_spread_over_the_tensors(name: str) -> None:
    model = MODELS[name]
    made = layers(model, 3.0, gradient_bytes=2)
    assert sum(layer.forward for layer in made) == pytest.approx(1)
    assert sum(layer.backward for layer in made) == pytest.approx(2)
    assert sum(sum(layer.gradient_bytes) for layer in made) == 2 * model.elements
    assert compute_seconds(model, 10, 60.0) == model.products


def test_a_tied_embedding_computes_first_in_backward_and_is_ready_last() -> None:
    made = layers(MODELS["gpt-2"], 1.0)
    assert made[0].backward == 0
    assert made[-1].backward > 0
    assert made[-1].gradient_bytes == []


# A list of one's own

LISTED = """
embed.weight (100, 8)
fc.weight: torch.Size([10, 8])
fc.bias [10]

scale ()
4096
"""


def test_a_pasted_list_is_a_model() -> None:
    model = parse(LISTED)
    assert [parameter.shape for parameter in model.parameters] == [
        (100, 8),
        (10, 8),
        (10,),
        (),
        (4096,),
    ]
    assert [parameter.products for parameter in model.parameters] == [0, 1, 0, 0, 1]
    assert model.elements == 800 + 80 + 10 + 1 + 4096


def test_what_named_parameters_prints_is_the_model() -> None:
    model = MODELS["gpt-2"]
    lines = [f"{parameter.name} {parameter.shape}" for parameter in model.parameters]
    pasted = parse("\n".join(lines))
    assert pasted.parameters == model.parameters


NONSENSE = {
    "": "the list is empty: expected a name and a shape",
    "fc.weight": 'line 1: expected a name and a shape, .* not "fc.weight"',
    "\nfc.weight (10; 20)": "line 2: expected",
    "2,049,000": "line 1: expected",
    "fc.weight (10, -20)": "line 1: expected",
    "fc.weight (10, 0)": 'line 1: expected at least 1 element, not "fc.weight \\(10, 0\\)"',
    "x" * 5000: f'not "{"x" * 40}…"',
    "1\n" * (MOST_TENSORS + 1): "the list has 5001 tensors, expected at most 5000",
    "9" * 30: "too many elements, expected at most 1000000000000",
}


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_gets_one_line_that_says_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=NONSENSE[text]) as error:
        parse(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200
