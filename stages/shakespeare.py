"""A text to learn from, and a language model small enough for a CPU.

The text is Shakespeare's, in the public domain: the first 400,000 characters
of `data/tinyshakespeare/input.txt` of github.com/karpathy/char-rnn.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEXT = Path(__file__).with_name("shakespeare.txt")
VOCAB_SIZE = 1024
LENGTH = 65  # tokens of a sequence: 64 times, one is predicted


def load_text() -> tuple[Tensor, Tensor]:
    """The text's sequences, to train and to test: (sequences, 65), int64.

    The last tenth is the test. The tokenizer is trained here, in a moment, on
    the text; it is the same on every rank.
    """
    text = TEXT.read_text(encoding="utf-8")
    tokens = torch.tensor(train_tokenizer(text).encode(text).ids)
    count = len(tokens) // LENGTH
    sequences = tokens[: count * LENGTH].view(count, LENGTH)
    return sequences[: -(count // 10)], sequences[-(count // 10) :]


def train_tokenizer(text: str) -> Any:
    """A byte-level BPE tokenizer of 1,024 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    return tokenizer


def build_language_model() -> Any:
    """SmolLM2's architecture with a million random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=144,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
