"""SmolLM2 as a classifier of sentence pairs, and smaller models of the same architecture."""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from miniddp.data import from_hub

MODEL_ID = "HuggingFaceTB/SmolLM2-360M-Instruct"
MODEL_REVISION = "a10cc1512eabd3dde888204e902eca88bddb4951"
MODEL_SIZE = "360m"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_TOKEN = "<|im_end|>"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Size:
    """What differs between the models of the family; each has three query heads per key head."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SIZES = {
    "tiny": Size(96, 256, 4, 6, 2, 2048),
    "5m": Size(192, 512, 11, 6, 2, 4096),
    "25m": Size(480, 1280, 9, 15, 5, 6144),
    "135m": Size(576, 1536, 30, 9, 3, 49152),
    "360m": Size(960, 2560, 32, 15, 5, 49152),
}
"""Sizes by name. 135m and 360m are SmolLM2's own; the names count all parameters."""


def load_model(size: str = MODEL_SIZE, pretrained: bool = True) -> Any:
    """A ``LlamaForSequenceClassification`` with two labels, in float32, on the CPU.

    Pretrained weights exist for "360m": SmolLM2-360M-Instruct at a pinned revision. Every other
    size, and "360m" when the hub cannot give it, is randomly initialised. A log line says which.
    The classification head is always new: seed torch before the call, alike on every rank.

    Raises:
        ValueError: no such size.
    """
    check_size(size)
    if pretrained and size == MODEL_SIZE:
        model = from_hub(f"weights of {MODEL_ID}", load_pretrained)
        if model is not None:
            logger.info("model %s: pretrained weights of %s", size, MODEL_ID)
            return model
    model = build_model(size)
    count = sum(parameter.numel() for parameter in model.parameters())
    logger.info("model %s: random weights, %.1f million parameters", size, count / 1e6)
    return model


def load_pretrained() -> Any:
    """SmolLM2-360M-Instruct from the hub with a new classification head."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        MODEL_ID, revision=MODEL_REVISION, num_labels=2
    )
    model.config.pad_token_id = SPECIAL_TOKENS.index(PAD_TOKEN)
    return model.to(torch.float32)


def build_model(size: str) -> Any:
    """The architecture of SmolLM2 at ``size``, with random weights."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config: dict[str, Any] = {
        **asdict(SIZES[size]),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "num_labels": 2,
        "pad_token_id": SPECIAL_TOKENS.index(PAD_TOKEN),
    }
    return LlamaForSequenceClassification(LlamaConfig(**config))  # type: ignore[no-untyped-call]


def load_tokenizer(
    sentences: Iterable[str], size: str = MODEL_SIZE, pretrained: bool = True
) -> Any:
    """The tokenizer for a model of ``size``; a log line says which.

    SmolLM2's own where the model has its vocabulary (135m, 360m) and the hub gives it, otherwise
    one trained here on ``sentences``. Both pad on the right, with the same token.

    Raises:
        ValueError: no such size.
    """
    check_size(size)
    vocab_size = SIZES[size].vocab_size
    if pretrained and vocab_size == SIZES[MODEL_SIZE].vocab_size:
        tokenizer = from_hub(f"tokenizer of {MODEL_ID}", load_pretrained_tokenizer)
        if tokenizer is not None:
            logger.info("tokenizer of %s: %d tokens", MODEL_ID, len(tokenizer))
            return tokenizer
    tokenizer = train_tokenizer(sentences, vocab_size)
    logger.info("tokenizer trained on the training sentences: %d tokens", len(tokenizer))
    return tokenizer


def load_pretrained_tokenizer() -> Any:
    """SmolLM2's tokenizer from the hub."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        MODEL_ID, revision=MODEL_REVISION, pad_token=PAD_TOKEN, padding_side="right"
    )


def train_tokenizer(sentences: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most ``vocab_size`` tokens; the same on every rank."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


def check_size(size: str) -> None:
    """Raises a ValueError that names the sizes if ``size`` is none of them."""
    if size not in SIZES:
        raise ValueError(f"model size must be one of {', '.join(SIZES)}, got {size!r}")
