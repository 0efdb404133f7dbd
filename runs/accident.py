"""miniddp.train, with an accident: after ACCIDENT_STEP steps rank 1 is killed, once.

Takes the options of miniddp.train; needs --checkpoint. Rank 0 writes the loss of every step
into steps.txt in the checkpoint's folder.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import miniddp.train as training
from miniddp import SimpleDDP
from miniddp.batches import Batch
from miniddp.report import Step
from miniddp.train import train_step

ACCIDENT_STEP = 13
folder = Path(sys.argv[sys.argv.index("--checkpoint") + 1])
rank = int(os.environ["RANK"])


def step_with_accident(model: SimpleDDP, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
    step = train_step(model, optimizer, batch)
    number = int(optimizer.state[next(model.parameters())]["step"])
    if rank == 0:
        with (folder / "steps.txt").open("a") as file:
            file.write(f"{number} {step.loss.item()!r}\n")
    happened = folder / "accident"
    if rank == 1 and number == ACCIDENT_STEP and not happened.exists():
        happened.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step


training.train_step = step_with_accident
training.main()
sys.stdout.flush()
os._exit(0)  # now: a restart after a crash in Python's own exit would find nothing left to do
