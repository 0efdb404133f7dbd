"""What can be chosen about a training, in Python and on the command line."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from finetune.model import SIZES

CHOICES: dict[str, Sequence[Any]] = {
    "model": list(SIZES),
    "ddp": ["simple", "miniddp", "torch"],
    "amp": ["off", "bf16", "fp16"],
}
# When resumed; the other options have shaped the steps so far.
MAY_CHANGE = {"data_dir", "epochs", "steps", "checkpoint", "checkpoint_every"}
MAY_CHANGE |= {"keep", "resume", "elastic", "timeout", "profile"}
LEAST = {"warmup": 0, "seed": 0}  # of whole numbers; that of the others is 1


class OptionsError(ValueError):
    """Options that nothing can be trained with: which, and why."""


@dataclass(frozen=True)
class Options:
    """The options of the command line; `OptionsError` for a bad value."""

    data_dir: str | None = None
    model: str = "tiny"
    pretrained: bool = True
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 16
    accumulation: int = 1
    ddp: str = "simple"
    amp: str = "off"
    lr: float = 1e-3
    warmup: int = 0
    clip: float | None = None
    max_length: int = 128
    seed: int = 0
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    resume: str | None = None
    elastic: bool = False
    timeout: int = 600
    profile: str | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in CHOICES and value not in CHOICES[name]:
                wanted = f"one of {', '.join(CHOICES[name])}"
            elif type(value) is int and not LEAST.get(name, 1) <= value < 2**31:
                wanted = f"at least {LEAST.get(name, 1)} and below 2^31"
            elif type(value) is float and not 0 < value < 1e30:
                wanted = "a positive number below 1e30"
            elif value == "":
                wanted = "a folder"
            else:
                continue
            shown = repr(value)[:100]
            raise OptionsError(f"{flag(name)} must be {wanted}, got {shown}")
        if self.batch_size % self.accumulation:
            raise OptionsError(
                f"--accumulation must divide --batch-size, got "
                f"{self.accumulation} for {self.batch_size} pairs"
            )
        if self.checkpoint is None and self.checkpoint_every:
            raise OptionsError("--checkpoint-every needs --checkpoint")
        if self.checkpoint is None and self.resume == "auto":
            raise OptionsError("--resume auto needs --checkpoint")


def flag(name: str) -> str:
    """An option on the command line: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


class Unchanged:
    """What has shaped the steps so far, of a checkpoint: else it is refused."""

    def __init__(self, options: Options, data: str) -> None:
        chosen = asdict(options).items()
        self.facts = {flag(k): v for k, v in chosen if k not in MAY_CHANGE}
        self.facts["SHA-256 of the pairs' tokens"] = data

    def state_dict(self) -> dict[str, Any]:
        return self.facts

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, value in self.facts.items():
            if value != (was := saved.get(name)):
                was = str(was)[:100]
                raise ValueError(f"saved with {name} {was}, not {value}")


def check_outputs(options: Options) -> None:
    """Raise `OptionsError` if this rank cannot write what they ask for."""
    for name in ("checkpoint", "profile"):
        folder = getattr(options, name)
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            where = f"{flag(name)}: cannot write into {folder}"
            raise OptionsError(f"{where}: {error.strerror}") from error


class Parser(argparse.ArgumentParser):
    """Raises its errors, for all ranks to hear of; rank 0 alone gives help."""

    def error(self, message: str) -> NoReturn:
        raise OptionsError(message[:200])

    def print_help(self, file: Any = None) -> None:
        if int(os.environ.get("RANK", 0)) == 0:
            super().print_help(file)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """From the command line, or `arguments`; raises `OptionsError`."""
    form = argparse.ArgumentDefaultsHelpFormatter
    about = "Fine-tune a classifier of sentence pairs, on one rank or on many."
    parser = Parser("finetune", description=about, formatter_class=form)
    parser.allow_abbrev = False
    parser.set_defaults(**asdict(Options()))
    add, on_off = parser.add_argument, argparse.BooleanOptionalAction
    add("--data-dir", help="folder with the original MRPC files")
    add("--model", help=f"its size: {', '.join(SIZES)}")
    add("--pretrained", action=on_off, help="published weights, for 360m")
    add("--epochs", type=int, help="passes over the training pairs")
    add("--steps", type=int, help="stop after so many, those resumed included")
    add("--batch-size", type=int, help="pairs per rank in each step")
    add("--accumulation", type=int, help="micro-batches in each such batch")
    add("--ddp", help="averages the gradients: simple, miniddp or torch")
    add("--amp", help="mixed precision: off, bf16, or fp16 on a GPU")
    add("--lr", type=float, help="learning rate; about 2e-5 if pretrained")
    add("--warmup", type=int, help="steps until the learning rate is reached")
    add("--clip", type=float, help="largest norm of the averaged gradient")
    add("--max-length", type=int, help="tokens of a pair; the rest is cut off")
    add("--seed", type=int, help="of the weights and the order of the pairs")
    add("--checkpoint", help="folder for checkpoints, seen by every rank")
    add("--checkpoint-every", type=int, help="steps between checkpoints")
    add("--keep", type=int, help="so many of the newest checkpoints")
    add("--resume", help="a file, or auto: the newest of --checkpoint")
    add("--elastic", action=on_off, help="resume on other numbers of ranks")
    add("--timeout", type=int, help="seconds that a rank waits for another")
    add("--profile", help="folder for a trace of steps 8 to 12")
    return Options(**vars(parser.parse_args(arguments)))
