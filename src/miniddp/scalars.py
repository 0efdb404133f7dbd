"""Curves for TensorBoard, written by rank 0."""

from types import TracebackType
from typing import Any

from miniddp.accumulation import global_mean
from miniddp.agree import on_every_rank
from miniddp.options import TrainingError
from miniddp.process import get
from miniddp.report import Step


class Scalars:
    """A context that writes a training's curves into `folder`; does nothing where that is None.

    All ranks call it. Raises `TrainingError` on every rank if TensorBoard is not installed.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self._writer: Any = on_every_rank(self._open, TrainingError)

    def _open(self) -> Any:
        if self.folder is None or get("rank") != 0:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrainingError(
                f"tensorboard needs the package of that name, run pip install tensorboard ({error})"
            ) from error
        return SummaryWriter(self.folder)  # type: ignore[no-untyped-call]

    def write_step(self, number: int, step: Step, learning_rate: float) -> None:
        """The joined batch's loss, the step's learning rate and rank 0's seconds."""
        if self.folder is None:
            return
        loss = global_mean(step.loss, 1).item()
        self.write(
            number,
            {
                "train/loss": loss,
                "train/learning_rate": learning_rate,
                "train/step_seconds": step.seconds,
                "train/sync_seconds": step.sync_seconds,
            },
        )

    def write(self, number: int, values: dict[str, float]) -> None:
        """Values by name, after step `number`."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, number)

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
