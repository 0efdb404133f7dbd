"""What can be chosen about a training, in Python and on the command line."""

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

import torch.distributed as dist

from finetune.model import SIZES


class OptionsError(ValueError):
    """Options that nothing can be trained with: which, and why."""


def option(
    default: Any,
    help: str,
    choices: Sequence[str] = (),
    least: int = 1,
    may_change: bool = False,
) -> Any:
    """An option, stated once: its flag, type and checks come from the field.

    `least`: of whole numbers. `may_change`: when resumed; the other options
    have shaped the steps so far.
    """
    facts = {"help": help, "choices": choices, "least": least, "may_change": may_change}
    return dataclasses.field(default=default, metadata=facts)


@dataclass(frozen=True)
class Options:
    """The options of the command line; `OptionsError` for a bad value."""

    data_dir: str | None = option(
        None, "folder with the original MRPC files", may_change=True
    )
    model: str = option("tiny", "its size", choices=tuple(SIZES))
    pretrained: bool = option(True, "published weights, for 360m")
    epochs: int = option(1, "passes over the training pairs", may_change=True)
    steps: int | None = option(
        None, "stop after so many, those resumed included", may_change=True
    )
    batch_size: int = option(16, "pairs per rank in each step")
    accumulation: int = option(1, "micro-batches in each such batch")
    ddp: str = option(
        "simple", "averages the gradients", choices=("simple", "miniddp", "torch")
    )
    amp: str = option(
        "off", "mixed precision; fp16 on a GPU", choices=("off", "bf16", "fp16")
    )
    lr: float = option(1e-3, "learning rate; about 2e-5 if pretrained")
    warmup: int = option(0, "steps until the learning rate is reached", least=0)
    clip: float | None = option(None, "largest norm of the averaged gradient")
    max_length: int = option(128, "tokens of a pair; the rest is cut off")
    seed: int = option(0, "of the weights and the order of the pairs", least=0)
    checkpoint: str | None = option(
        None, "folder for checkpoints, seen by every rank", may_change=True
    )
    checkpoint_every: int | None = option(
        None, "steps between checkpoints", may_change=True
    )
    keep: int = option(2, "so many of the newest checkpoints", may_change=True)
    resume: str | None = option(
        None, "a file, or auto: the newest of --checkpoint", may_change=True
    )
    elastic: bool = option(False, "resume on other numbers of ranks", may_change=True)
    timeout: int = option(600, "seconds that a rank waits for another", may_change=True)
    backend: str | None = option(
        None, "torch's name of one; by default what suits the devices", may_change=True
    )
    profile: str | None = option(
        None, "folder for a trace of steps 8 to 12", may_change=True
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = _missed(value, field.metadata["choices"], field.metadata["least"])
            if wanted:
                shown = repr(value)[:100]
                raise OptionsError(f"{flag(field.name)} must be {wanted}, got {shown}")
        if self.backend and not has_backend(self.backend):
            raise OptionsError(
                f"--backend must be one that this torch has, got {self.backend[:100]!r}"
            )
        if self.batch_size % self.accumulation:
            raise OptionsError(
                f"--accumulation must divide --batch-size, got "
                f"{self.accumulation} for {self.batch_size} pairs"
            )
        if self.checkpoint is None and self.checkpoint_every:
            raise OptionsError("--checkpoint-every needs --checkpoint")
        if self.checkpoint is None and self.resume == "auto":
            raise OptionsError("--resume auto needs --checkpoint")


def _missed(value: Any, choices: Sequence[str], least: int) -> str | None:
    """What a value should be and is not, if so."""
    if choices and value not in choices:
        return f"one of {', '.join(choices)}"
    if type(value) is int and not least <= value < 2**31:
        return f"at least {least} and below 2^31"
    if type(value) is float and not 0 < value < 1e30:
        return "a positive number below 1e30"
    if value == "":
        return "something"
    return None


def has_backend(name: str) -> bool:
    try:
        return dist.is_backend_available(name)
    except ValueError:  # no pair of a device and a backend
        return False


def flag(name: str) -> str:
    """An option on the command line: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


class ShapingOptions:
    """What has shaped the steps so far: a checkpoint of other ones is refused."""

    def __init__(self, options: Options, digest_of_data: str) -> None:
        self.facts = {
            flag(field.name): getattr(options, field.name)
            for field in dataclasses.fields(options)
            if not field.metadata["may_change"]
        }
        self.facts["SHA-256 of the pairs' tokens"] = digest_of_data

    def state_dict(self) -> dict[str, Any]:
        return self.facts

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, value in self.facts.items():
            if saved.get(name) != value:
                before = str(saved.get(name))[:100]
                raise ValueError(f"saved with {name} {before}, not {value}")


def check_outputs(options: Options) -> None:
    """Raise `OptionsError` if this rank cannot write what they ask for."""
    for name in ("checkpoint", "profile"):
        folder = getattr(options, name)
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            problem = f"{flag(name)}: cannot write into {folder}"
            raise OptionsError(f"{problem}: {error.strerror}") from error


class Parser(argparse.ArgumentParser):
    """Raises its errors, for all ranks to hear of; rank 0 alone gives help."""

    def error(self, message: str) -> NoReturn:
        raise OptionsError(message[:200])

    def print_help(self, file: Any = None) -> None:
        if int(os.environ.get("RANK", 0)) == 0:
            super().print_help(file)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """From the command line, or `arguments`; raises `OptionsError`."""
    parser = Parser(
        "finetune",
        description="Fine-tune a classifier of sentence pairs, on one rank or on many.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    types = get_type_hints(Options)
    for field in dataclasses.fields(Options):
        help = field.metadata["help"]
        if choices := field.metadata["choices"]:
            help = f"{help}: {', '.join(choices)}"
        kind = types[field.name]
        kinds = [part for part in get_args(kind) or (kind,) if part is not NoneType]
        parse: dict[str, Any] = {"type": kinds[0]}
        if kinds[0] is bool:
            parse = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(flag(field.name), default=field.default, help=help, **parse)
    return Options(**vars(parser.parse_args(arguments)))
