"""Train, save, leave when told to, go on when started again, in plain torch.

torchrun --standalone --nproc_per_node=2 runs/preemptible.py build/job

All machines see the same folder. A file `leave` in it asks the training to go.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY, LOOK_EVERY = 400, 100, 10


def start() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def told_to_leave(folder: Path, device: torch.device) -> bool:
    """Rank 0 looks and tells the others: all leave after the same step."""
    told = torch.tensor(float((folder / "leave").exists()), device=device)
    dist.broadcast(told, src=0)
    return bool(told.item())


def save(path: Path, state: dict[str, object]) -> None:
    """Rank 0 writes beside the old file, then takes its place."""
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def main(folder: Path) -> None:
    device = start()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pt"
    model = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    leaving = False
    while step < STEPS and not leaving:
        ddp(torch.randn(32, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        leaving = step % LOOK_EVERY == 0 and told_to_leave(folder, device)
        if leaving or step % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "step": step}
            save(path, {**state, "optimizer": optimizer.state_dict()})
    if dist.get_rank() == 0:
        print(f"step {step} of {STEPS}", flush=True)
        if step == STEPS:
            (folder / "done").touch()
    del ddp  # after its group it can hang: torch waits for gloo, gloo for Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
