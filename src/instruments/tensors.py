"""A model as a list of tensors: what DDP's buckets and a step's compute depend on.

The models in `MODELS` are written out from the numbers of their configurations, in the
order of `model.parameters()`. `parse` reads a list of one's own.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from instruments.cost import check_amounts
from instruments.simulator import Layer

MOST_TENSORS = 5000
MOST_ELEMENTS = 10**12
EXPECTED = 'a name and a shape, such as "fc.weight (10, 20)", or a number of elements'
EMBEDDING = re.compile(r"emb|wte|wpe", re.IGNORECASE)


class Parameter(NamedTuple):
    """A tensor that is trained.

    Attributes:
        name: As in `named_parameters()`; `""` where it is not known.
        shape: Of the tensor.
        products: How often each of its elements multiplies, in forward, for one token
            of a language model or one image.
    """

    name: str
    shape: tuple[int, ...]
    products: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """Tensors in the order of `parameters()`, which is about that of forward.

    Attributes:
        title: What it is called.
        unit: What is counted as work: "token" or "image".
        parameters: Its tensors.
        tied: Whether the first tensor, the embedding, is also the matrix of the output.
            It then multiplies at the end of forward, and its gradient is complete when
            backward ends.
    """

    title: str
    unit: str
    parameters: tuple[Parameter, ...]
    tied: bool = False

    @property
    def elements(self) -> int:
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def products(self) -> int:
        """Multiplications in forward for one token or image; attention's own left out."""
        counted = sum(each.elements * each.products for each in self.parameters)
        return counted + (self.parameters[0].elements if self.tied else 0)


def layers(model: Model, compute: float, gradient_bytes: int = 4) -> list[Layer]:
    """A layer of the simulator for each tensor, in the order of forward.

    `compute` is the seconds of forward and backward: a third is forward. It is spread
    over the tensors as their multiplications are. The product with a tied embedding is
    a layer of its own at the end, without a gradient.
    """
    check_amounts(compute=compute)
    second = compute / 3 / max(1, model.products)
    made = []
    for parameter in model.parameters:
        forward = second * parameter.elements * parameter.products
        size = gradient_bytes * parameter.elements
        made.append(Layer(forward, 2 * forward, [size]))
    if model.tied:
        forward = second * model.parameters[0].elements
        made.append(Layer(forward, 2 * forward, []))
    return made


def compute_seconds(model: Model, units: float, flops_per_second: float) -> float:
    """Forward and backward of so many tokens or images: 6 FLOPs per multiplication."""
    return 6 * model.products * units / flops_per_second


# A list of one's own

_LINE = re.compile(
    r"(?:(?P<name>\S+?):?\s+)?"
    r"(?:(?:torch\.Size\()?[(\[](?P<shape>[\d,\s]*)[)\]]\)?|(?P<number>\d+))"
)


def parse(text: str, title: str = "your list") -> Model:
    """The model that a text lists, a tensor in each line: a shape or a number.

    Each line is what `print(name, tuple(parameter.shape))` shows, or a number of
    elements. A tensor with two dimensions or more, or whose shape is not known,
    multiplies once for each token; one whose name says embedding (`emb`, `wte`, `wpe`)
    does not.

    Raises:
        ValueError: A line that is neither, no line, or too much of it.
    """
    parameters = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            parameters.append(_parameter(line.strip(), number))
    if not parameters:
        raise ValueError(f"the list is empty: expected {EXPECTED} in each line")
    if len(parameters) > MOST_TENSORS:
        raise ValueError(
            f"the list has {len(parameters)} tensors, expected at most {MOST_TENSORS}"
        )
    model = Model(title, "token", tuple(parameters))
    if model.elements > MOST_ELEMENTS:
        raise ValueError(
            f"the list has too many elements, expected at most {MOST_ELEMENTS}"
        )
    return model


def _parameter(line: str, number: int) -> Parameter:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(f"line {number}: expected {EXPECTED}, not {_brief(line)}")
    name = found["name"] or ""
    digits = re.findall(r"\d+", found["number"] or found["shape"])
    shape = tuple(int(part) for part in digits)
    if math.prod(shape) == 0:
        raise ValueError(
            f"line {number}: expected at least 1 element, not {_brief(line)}"
        )
    multiplies = len(shape) >= 2 or found["number"] is not None
    products = 1 if multiplies and not EMBEDDING.search(name) else 0
    return Parameter(name, shape, products)


def _brief(line: str) -> str:
    return f'"{line}"' if len(line) <= 40 else f'"{line[:40]}…"'


# Models, from their configurations


def linear(
    name: str, rows: int, columns: int, products: int = 1, bias: bool = True
) -> Iterable[Parameter]:
    yield Parameter(f"{name}.weight", (rows, columns), products)
    if bias:
        yield Parameter(f"{name}.bias", (rows,), 0)


def norm(name: str, width: int) -> Iterable[Parameter]:
    yield Parameter(f"{name}.weight", (width,), 0)
    yield Parameter(f"{name}.bias", (width,), 0)


class Llama(NamedTuple):
    """A configuration; the names are those of `transformers.LlamaConfig`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tied: bool = True


def llama(title: str, config: Llama, labels: int = 0) -> Model:
    """A language model; with `labels` a classifier in its place."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    found = [Parameter("embed_tokens.weight", (config.vocab_size, hidden), 0)]
    for number in range(config.num_hidden_layers):
        layer = f"layers.{number}"
        found += linear(f"{layer}.self_attn.q_proj", hidden, hidden, bias=False)
        found += linear(f"{layer}.self_attn.k_proj", keys, hidden, bias=False)
        found += linear(f"{layer}.self_attn.v_proj", keys, hidden, bias=False)
        found += linear(f"{layer}.self_attn.o_proj", hidden, hidden, bias=False)
        found += linear(f"{layer}.mlp.gate_proj", inner, hidden, bias=False)
        found += linear(f"{layer}.mlp.up_proj", inner, hidden, bias=False)
        found += linear(f"{layer}.mlp.down_proj", hidden, inner, bias=False)
        found.append(Parameter(f"{layer}.input_layernorm.weight", (hidden,), 0))
        found.append(
            Parameter(f"{layer}.post_attention_layernorm.weight", (hidden,), 0)
        )
    found.append(Parameter("norm.weight", (hidden,), 0))
    if labels:
        found += linear("score", labels, hidden, bias=False)
    elif not config.tied:
        found += linear("lm_head", config.vocab_size, hidden, bias=False)
    return Model(title, "token", tuple(found), config.tied and not labels)


def gpt2(title: str, hidden: int, count: int, vocabulary: int, length: int) -> Model:
    """Its weights lie the other way round: inputs times outputs."""
    found = [
        Parameter("wte.weight", (vocabulary, hidden), 0),
        Parameter("wpe.weight", (length, hidden), 0),
    ]
    for number in range(count):
        layer = f"h.{number}"
        found += norm(f"{layer}.ln_1", hidden)
        found += _transposed(f"{layer}.attn.c_attn", hidden, 3 * hidden)
        found += _transposed(f"{layer}.attn.c_proj", hidden, hidden)
        found += norm(f"{layer}.ln_2", hidden)
        found += _transposed(f"{layer}.mlp.c_fc", hidden, 4 * hidden)
        found += _transposed(f"{layer}.mlp.c_proj", 4 * hidden, hidden)
    found += norm("ln_f", hidden)
    return Model(title, "token", tuple(found), tied=True)


def _transposed(name: str, inputs: int, outputs: int) -> Iterable[Parameter]:
    yield Parameter(f"{name}.weight", (inputs, outputs), 1)
    yield Parameter(f"{name}.bias", (outputs,), 0)


def bert(title: str, hidden: int, count: int, vocabulary: int) -> Model:
    """`BertForPreTraining`. Pooler and next sentence work once for a whole sequence."""
    found = [
        Parameter("embeddings.word_embeddings.weight", (vocabulary, hidden), 0),
        Parameter("embeddings.position_embeddings.weight", (512, hidden), 0),
        Parameter("embeddings.token_type_embeddings.weight", (2, hidden), 0),
    ]
    found += norm("embeddings.LayerNorm", hidden)
    for number in range(count):
        layer = f"layer.{number}"
        for name in ("query", "key", "value"):
            found += linear(f"{layer}.attention.self.{name}", hidden, hidden)
        found += linear(f"{layer}.attention.output.dense", hidden, hidden)
        found += norm(f"{layer}.attention.output.LayerNorm", hidden)
        found += linear(f"{layer}.intermediate.dense", 4 * hidden, hidden)
        found += linear(f"{layer}.output.dense", hidden, 4 * hidden)
        found += norm(f"{layer}.output.LayerNorm", hidden)
    found += linear("pooler.dense", hidden, hidden, products=0)
    found.append(Parameter("cls.predictions.bias", (vocabulary,), 0))
    found += linear("cls.predictions.transform.dense", hidden, hidden)
    found += norm("cls.predictions.transform.LayerNorm", hidden)
    found += linear("cls.seq_relationship", 2, hidden, products=0)
    return Model(title, "token", tuple(found), tied=True)


def vit(title: str, hidden: int, count: int, patch: int, classes: int) -> Model:
    """On images of 224 x 224: a token for each patch, and one for the class."""
    patches = (224 // patch) ** 2
    tokens = patches + 1
    found = [
        Parameter("cls_token", (1, 1, hidden), 0),
        Parameter("position_embeddings", (1, tokens, hidden), 0),
        Parameter("patch_embeddings.weight", (hidden, 3, patch, patch), patches),
        Parameter("patch_embeddings.bias", (hidden,), 0),
    ]
    for number in range(count):
        layer = f"layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found += linear(f"{layer}.attention.{name}", hidden, hidden, tokens)
        found += norm(f"{layer}.layernorm_before", hidden)
        found += norm(f"{layer}.layernorm_after", hidden)
        found += linear(f"{layer}.mlp.fc1", 4 * hidden, hidden, tokens)
        found += linear(f"{layer}.mlp.fc2", hidden, 4 * hidden, tokens)
    found += norm("layernorm", hidden)
    found += linear("classifier", classes, hidden)
    return Model(title, "image", tuple(found))


def resnet50(title: str) -> Model:
    """As in torchvision, on images of 224 x 224: a kernel multiplies at each position."""
    found: list[Parameter] = []

    def convolution(
        name: str, batch_norm: str, outputs: int, inputs: int, size: int, side: int
    ) -> None:
        shape = (outputs, inputs, size, size)
        found.append(Parameter(f"{name}.weight", shape, side * side))
        found.extend(norm(batch_norm, outputs))

    convolution("conv1", "bn1", 64, 3, 7, 112)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        side = 56 // 2**stage
        for number in range(blocks):
            block = f"layer{stage + 1}.{number}"
            shrinks = stage > 0 and number == 0  # the second convolution, by stride 2
            before = 2 * side if shrinks else side
            convolution(f"{block}.conv1", f"{block}.bn1", width, inputs, 1, before)
            convolution(f"{block}.conv2", f"{block}.bn2", width, width, 3, side)
            convolution(f"{block}.conv3", f"{block}.bn3", 4 * width, width, 1, side)
            if number == 0:
                shortcut = f"{block}.downsample"
                convolution(
                    f"{shortcut}.0", f"{shortcut}.1", 4 * width, inputs, 1, side
                )
            inputs = 4 * width
    found.extend(linear("fc", 1000, inputs))
    return Model(title, "image", tuple(found))


SMOLLM2_360M = Llama(960, 2560, 32, 15, 5, 49152)
SMOLLM2_1_7B = Llama(2048, 8192, 24, 32, 32, 49152)
LLAMA_3_8B = Llama(4096, 14336, 32, 32, 8, 128256, tied=False)

MODELS: dict[str, Model] = {
    "resnet-50": resnet50("ResNet-50"),
    "vit-b-16": vit("ViT-B/16", 768, 12, 16, 1000),
    "bert-large": bert("BERT-Large", 1024, 24, 30522),
    "gpt-2": gpt2("GPT-2, 124M", 768, 12, 50257, 1024),
    "smollm2-135m": llama("SmolLM2-135M", Llama(576, 1536, 30, 9, 3, 49152)),
    "smollm2-360m": llama("SmolLM2-360M", SMOLLM2_360M),
    "smollm2-360m-classifier": llama("SmolLM2-360M, classifier", SMOLLM2_360M, 2),
    "smollm2-1.7b": llama("SmolLM2-1.7B", SMOLLM2_1_7B),
    "llama-3-8b": llama("Llama-3 8B", LLAMA_3_8B),
}
"""Models by name. The numbers are those of the published configurations."""
