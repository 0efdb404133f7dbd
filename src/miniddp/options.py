"""What can be chosen about a training run."""

from dataclasses import dataclass

from miniddp.command_line import option
from miniddp.model import SIZES

CHOICES = {
    "model": tuple(SIZES),
    "ddp": ("simple", "miniddp", "torch"),
    "amp": ("off", "bf16", "fp16"),
}


class TrainingError(ValueError):
    """A run that cannot start: one line that says which option, and why."""


@dataclass(frozen=True)
class Options:
    """What can be chosen; every field is also a flag of the command line.

    Raises:
        ValueError: a value that cannot be trained with.
    """

    data_dir: str | None = option(None, "folder with the original MRPC files")
    model: str = option("tiny", f"size of the model: {', '.join(SIZES)}")
    pretrained: bool = option(True, "use the published weights where there are any (360m)")
    epochs: int = option(1, "passes over the training pairs")
    steps: int | None = option(None, "stop after this many steps, those before a resume included")
    batch_size: int = option(16, "pairs per rank in each step; the joined batch is ranks x this")
    accumulation: int = option(1, "micro-batches that a rank cuts its batch into, to save memory")
    ddp: str = option("simple", f"what averages the gradients: {', '.join(CHOICES['ddp'])}")
    amp: str = option("off", f"mixed precision: {', '.join(CHOICES['amp'])}; fp16 needs a GPU")
    lr: float = option(1e-3, "learning rate of AdamW; pretrained weights want about 2e-5")
    scale_lr: bool = option(False, "multiply lr by joined batch / base-batch-size")
    base_batch_size: int = option(16, "the joined batch that lr was chosen for")
    warmup: int = option(0, "steps until the learning rate is reached: from 0, or scaled from lr")
    clip: float | None = option(None, "largest norm of the averaged gradient")
    max_length: int = option(128, "tokens of a pair after which the rest is cut off")
    seed: int = option(0, "seed of the initial weights and of the order of the pairs")
    checkpoint: str | None = option(None, "folder for checkpoints: the last two, and at the end")
    checkpoint_every: int | None = option(None, "steps from one checkpoint to the next")
    resume: str | None = option(
        None, "a checkpoint, a folder of them, or auto: the newest of --checkpoint if there is one"
    )
    profile: str | None = option(None, "folder for a trace of steps 8 to 12")
    tensorboard: str | None = option(None, "folder for TensorBoard's curves")

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        for name in (
            *("epochs", "steps", "batch_size", "accumulation", "base_batch_size"),
            *("max_length", "checkpoint_every"),
        ):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("warmup", "seed"):
            _check_at_least(name, getattr(self, name), 0)
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value}")
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"accumulation must divide batch_size, got {self.accumulation} micro-batches "
                f"for {self.batch_size} pairs"
            )
        if self.checkpoint is None and (self.checkpoint_every or self.resume == "auto"):
            name = "checkpoint_every" if self.checkpoint_every else "resume auto"
            raise ValueError(f"{name} needs checkpoint, the folder for checkpoints")

    @property
    def plain(self) -> bool:
        """Whether a step is forward, backward, `sync_gradients()` and update, and nothing else."""
        added = (self.amp != "off", self.accumulation > 1, self.clip, self.profile)
        return self.ddp == "simple" and not any(added)


def _check_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
