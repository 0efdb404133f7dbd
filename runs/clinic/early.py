"""Case 1: rank 1 loads a checkpoint that rank 0 has not written yet."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from instruments.toy import small_model
from miniddp.process import device


def load_too_early(rank: int, folder: str) -> Tensor:
    file = Path(folder) / "model.pt"
    model = small_model(seed=rank)
    if rank == 0:
        save_slowly(model.state_dict(), file)
    model.load_state_dict(torch.load(file, map_location=device()))
    return model[0].weight.detach().cpu()


def save_slowly(state: dict[str, Tensor], file: Path) -> None:
    time.sleep(0.5)  # a model of some gigabytes takes longer
    torch.save(state, file)


def look_before_loading(rank: int, folder: str) -> None:
    file = Path(folder) / "model.pt"
    if rank == 0:
        print(f"writes {file.name}")
        save_slowly(small_model().state_dict(), file)
    print(f"loads now, the file exists: {file.exists()}")


def load_after_the_barrier(rank: int, folder: str) -> Tensor:
    file = Path(folder) / "model.pt"
    model = small_model(seed=rank)
    if rank == 0:
        save_slowly(model.state_dict(), file)
    dist.barrier()
    model.load_state_dict(torch.load(file, map_location=device()))
    return model[0].weight.detach().cpu()
