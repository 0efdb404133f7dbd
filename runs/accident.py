"""finetune.train, with an accident: after ACCIDENT_STEP steps rank 1 is killed, once.

Takes the options of finetune.train; needs --checkpoint. Rank 0 writes the loss of every step
into steps.txt in the checkpoint's folder.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from finetune import training_step
from finetune.last_words import run
from finetune.train import main
from finetune.training_step import train_step

ACCIDENT_STEP = 13
folder = Path(sys.argv[sys.argv.index("--checkpoint") + 1])
rank = int(os.environ["RANK"])


def step_with_accident(
    model: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any
) -> torch.Tensor:
    loss = train_step(model, optimizer, *arguments, **options)
    number = int(optimizer.state[next(model.parameters())]["step"])
    if rank == 0:
        with (folder / "steps.txt").open("a") as file:
            file.write(f"{number} {loss.item()!r}\n")
    happened = folder / "accident"
    if rank == 1 and number == ACCIDENT_STEP and not happened.exists():
        while (folder / "steps.txt").read_text().count("\n") < number:
            time.sleep(0.01)  # the others may still be in this step
        happened.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return loss


training_step.train_step = step_with_accident
run(main)
