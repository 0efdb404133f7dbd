"""SmolLM2 as a classifier of sentence pairs, and smaller models of its kind."""

import functools
import logging
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

MODEL_ID = "HuggingFaceTB/SmolLM2-360M-Instruct"
MODEL_REVISION = "a10cc1512eabd3dde888204e902eca88bddb4951"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_TOKEN = "<|im_end|>"
PADDING: dict[str, Any] = {"pad_token": PAD_TOKEN, "padding_side": "right"}
TIMEOUT_SECONDS = 5.0
logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        model = from_hub(f"weights of {MODEL_ID}", load_pretrained)
        if model is not None:
            logger.info("model %s: pretrained weights of %s", size, MODEL_ID)
            return model
    model = build_model(size)
    millions = sum(part.numel() for part in model.parameters()) / 1e6
    text = "model %s: random weights, %.1f million parameters"
    logger.info(text, size, millions)
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
    """The architecture of SmolLM2 at `size`, with random weights."""
    import transformers

    config: dict[str, Any] = SIZES[size]._asdict()
    config |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    config |= {"rope_theta": 100000.0, "tie_word_embeddings": True}
    config |= {"num_labels": 2, "pad_token_id": SPECIAL_TOKENS.index(PAD_TOKEN)}
    llama: Any = transformers.LlamaForSequenceClassification
    return llama(transformers.LlamaConfig(**config))


def load_tokenizer(sentences: Iterable[str], size: str = "360m", pretrained: bool = True) -> Any:
    """SmolLM2's where the model has its vocabulary and the hub gives it.

    Else one trained here on `sentences`; a log line says which. Both pad on the
    right, with the same token.
    """
    vocab_size = SIZES[size].vocab_size
    if pretrained and vocab_size == SIZES["360m"].vocab_size:
        from transformers import AutoTokenizer as Auto

        known = {"revision": MODEL_REVISION, **PADDING}
        load = functools.partial(Auto.from_pretrained, MODEL_ID, **known)
        found = from_hub(f"tokenizer of {MODEL_ID}", load)
        if found is not None:
            logger.info("tokenizer of %s: %d tokens", MODEL_ID, len(found))
            return found
    tokenizer = train_tokenizer(sentences, vocab_size)
    where = "tokenizer trained on the training sentences"
    logger.info("%s: %d tokens", where, len(tokenizer))
    return tokenizer


def train_tokenizer(sentences: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens.

    The same sentences give the same one, on every rank.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast as Fast

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = [digits, pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    inputs = ["input_ids", "attention_mask"]
    made: Any = {"tokenizer_object": tokenizer, "model_input_names": inputs}
    return Fast(**made, **PADDING)  # type: ignore[no-untyped-call]


def from_hub(what: str, load: Callable[[], T]) -> T | None:
    """`load()`, or None and a warning when the hub cannot give `what`.

    It must answer within 5 seconds: its own client would try for minutes. With
    `HF_HUB_OFFLINE` only the cache is looked at.
    """
    problem = hub_problem()
    if problem is None:
        try:
            return load()
        except OSError as error:
            problem = str(error)
    short = " ".join(problem.split())[:200]
    logger.warning("no %s from the hub: %s", what, short)
    return None


@functools.cache
def hub_problem() -> str | None:
    """Why the hub cannot be asked; None if it can, or its cache is used."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()
    except OSError as error:
        return f"{constants.ENDPOINT} does not answer ({error})"
    return None
