"""Train, save, leave when told to, go on when started again, in plain torch.

SIGTERM, or a file `leave` in the folder, asks it to go. All machines see that.
torchrun --standalone --nproc_per_node=2 runs/preemptible.py build/job
"""

import argparse
import ctypes
import fcntl
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__" and sys.platform == "linux":
    # A signal when torchrun is killed, too, and while torch is imported.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group, or this holds it for ever

STEPS, SAVE_EVERY, LOOK_EVERY = 400, 100, 10
signals: list[int] = []


def start() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def largest(number: float, device: torch.device) -> float:
    """The largest of all ranks' numbers."""
    result = torch.tensor(float(number), dtype=torch.float64, device=device)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.item()


def go_on(problem: object, device: torch.device) -> None:
    """All ranks end if one has a problem, and that one says which."""
    if largest(problem is not None, device):
        sys.exit(str(problem) if problem else 1)


def claim(folder: Path) -> str | None:
    """Lock the folder, until this process ends. Returns what is wrong."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no child has it
    except (BlockingIOError, PermissionError):
        return f"another job trains in {folder}"
    return None


def load(path: Path, device: torch.device) -> dict[str, object]:
    """The checkpoint, if all ranks see the same: some may see an old folder."""
    state = {"step": 0}
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
    if largest(state["step"], device) != -largest(-state["step"], device):
        sys.exit(f"not all ranks see the checkpoint of step {state['step']}")
    return state


def save(path: Path, state: dict[str, object], device: torch.device) -> None:
    """Rank 0 writes beside the old file, then replaces it, or all ranks leave."""
    problem = None
    if dist.get_rank() == 0:
        unfinished = path.with_suffix(".new")
        try:
            with unfinished.open("wb") as file:
                torch.save(state, file)
                os.fsync(file.fileno())
            unfinished.replace(path)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch.save's own
            unfinished.unlink(missing_ok=True)
            problem = f"cannot save step {state['step']}: {error}"
    go_on(problem, device)


def main(folder: Path) -> None:
    device = start()
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    folder.mkdir(parents=True, exist_ok=True)
    go_on(claim(folder) if dist.get_rank() == 0 else None, device)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    state = load(folder / "checkpoint.pt", device)
    step = state["step"]
    if step:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    leaving = False
    while step < STEPS and not leaving:
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        ddp(torch.randn(32, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % LOOK_EVERY == 0:
            told = bool(signals) or (folder / "leave").exists()
            leaving = largest(told, device) > 0
        if leaving or step % SAVE_EVERY == 0 or step == STEPS:
            state = {"model": model.state_dict(), "step": step}
            state["optimizer"] = optimizer.state_dict()
            save(folder / "checkpoint.pt", state, device)
    all_done = largest(step < STEPS, device) == 0
    if dist.get_rank() == 0:
        print(f"step {step} of {STEPS}", flush=True)
        if all_done:
            (folder / "done").touch()
    del ddp  # after its group it can hang: torch waits for gloo, gloo for Python
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
