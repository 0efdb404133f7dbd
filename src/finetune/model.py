"""SmolLM2 as a classifier of sentence pairs, and smaller models of its kind."""

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from finetune.hub import Repository, from_hub

MODEL = Repository(
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "a10cc1512eabd3dde888204e902eca88bddb4951",
    "model",
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_TOKEN = "<|im_end|>"
PADDING_SIDE = "right"
logger = logging.getLogger(__name__)


class Size(NamedTuple):
    """What differs in the family; there are three query heads per key head."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SIZES = {  # 135m and 360m are SmolLM2's own; the names count all parameters
    "tiny": Size(96, 256, 4, 6, 2, 2048),
    "5m": Size(192, 512, 11, 6, 2, 4096),
    "25m": Size(480, 1280, 9, 15, 5, 6144),
    "135m": Size(576, 1536, 30, 9, 3, 49152),
    "360m": Size(960, 2560, 32, 15, 5, 49152),
}


def load_model(size: str = "360m", pretrained: bool = True) -> Any:
    """A `LlamaForSequenceClassification` with two labels, float32, on the CPU.

    "360m" is pretrained if the hub gives it; else the weights are random. A log
    line says which. The head is always new: seed torch alike on every rank.
    """
    if pretrained and size == "360m":
        model = from_hub(f"weights of {MODEL.id}", MODEL, load_pretrained)
        if model is not None:
            logger.info("model %s: pretrained weights of %s", size, MODEL.id)
            return model
    model = build_model(size)
    millions = sum(part.numel() for part in model.parameters()) / 1e6
    text = "model %s: random weights, %.1f million parameters"
    logger.info(text, size, millions)
    return model


def load_pretrained(local_files_only: bool) -> Any:
    """SmolLM2-360M-Instruct from the hub with a new classification head."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        MODEL.id,
        revision=MODEL.revision,
        local_files_only=local_files_only,
        num_labels=2,
    )
    model.config.pad_token_id = SPECIAL_TOKENS.index(PAD_TOKEN)
    return model.to(torch.float32)


def build_model(size: str) -> Any:
    """The architecture of SmolLM2 at `size`, with random weights."""
    import transformers

    llama: Any = transformers  # its types know neither option nor class well
    config = llama.LlamaConfig(
        **SIZES[size]._asdict(),
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        num_labels=2,
        pad_token_id=SPECIAL_TOKENS.index(PAD_TOKEN),
    )
    return llama.LlamaForSequenceClassification(config)


def load_tokenizer(
    sentences: Iterable[str], size: str = "360m", pretrained: bool = True
) -> Any:
    """SmolLM2's where the model has its vocabulary and the hub gives it.

    Else one trained here on `sentences`; a log line says which. Both pad on the
    right, with the same token.
    """
    vocab_size = SIZES[size].vocab_size
    if pretrained and vocab_size == SIZES["360m"].vocab_size:
        published = from_hub(
            f"tokenizer of {MODEL.id}", MODEL, load_published_tokenizer
        )
        if published is not None:
            logger.info("tokenizer of %s: %d tokens", MODEL.id, len(published))
            return published
    tokenizer = train_tokenizer(sentences, vocab_size)
    text = "tokenizer trained on the training sentences: %d tokens"
    logger.info(text, len(tokenizer))
    return tokenizer


def load_published_tokenizer(local_files_only: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        MODEL.id,
        revision=MODEL.revision,
        local_files_only=local_files_only,
        pad_token=PAD_TOKEN,
        padding_side=PADDING_SIDE,
    )


def train_tokenizer(sentences: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens.

    The same sentences give the same one, on every rank.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        pad_token=PAD_TOKEN,
        padding_side=PADDING_SIDE,
    )
