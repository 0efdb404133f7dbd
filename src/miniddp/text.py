"""A text to learn from, and a language model small enough for a CPU.

The text is Shakespeare's, in the public domain: the first 400,000 characters
of `data/tinyshakespeare/input.txt` of github.com/karpathy/char-rnn.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miniddp.model import Size, train_tokenizer

TEXT = Path(__file__).with_name("shakespeare.txt")
VOCAB_SIZE = 1024
LENGTH = 65  # tokens of a sequence: 64 times, one is predicted


def load_text() -> tuple[Tensor, Tensor]:
    """The text's sequences, to train and to test: (sequences, 65), int64.

    The last tenth is the test. The tokenizer is trained here, in a moment, on
    the text; it is the same on every rank.
    """
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text.split("\n\n"), VOCAB_SIZE)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    count = len(tokens) // LENGTH
    sequences = tokens[: count * LENGTH].view(count, LENGTH)
    return sequences[: -(count // 10)], sequences[-(count // 10) :]


def build_language_model() -> Any:
    """SmolLM2's architecture with a million random weights, float32."""
    import transformers

    size = Size(144, 384, 4, 6, 2, VOCAB_SIZE)._asdict()
    same: dict[str, Any] = {"rope_theta": 100000.0, "tie_word_embeddings": True}
    llama: Any = transformers.LlamaForCausalLM
    return llama(transformers.LlamaConfig(**size, **same, use_cache=False))
