"""A job that leaves when it is told to, and says which rank has not come.

torchrun --standalone --nproc_per_node=2 runs/pytorch/13_machines.py
"""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist


def start(backend):
    """Both groups give up long before the ten minutes, or thirty, of torch."""
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=2))


def call_the_roll(gloo, patience):
    """Raises on rank 0, with the numbers of the ranks that do not come."""
    dist.monitored_barrier(gloo, timeout=patience, wait_all_ranks=True)


def train(train_step, save, steps, every, device):
    told = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    for step in range(1, steps + 1):
        train_step(step)
        leave = torch.tensor(float(len(told)), device=device)
        dist.all_reduce(leave)  # the same answer on every rank
        if leave or step % every == 0 or step == steps:
            save(step)
        if leave:
            break


def main():
    gloo = start("gloo")
    for group in (dist.group.WORLD, gloo):
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(minutes=2)
    rank = dist.get_rank()
    done, saved = [], []

    def train_step(step):
        done.append(step)
        if rank == 1 and step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    train(train_step, saved.append, 100, 4, torch.device("cpu"))
    assert done == [1, 2, 3, 4, 5, 6]
    assert saved == [4, 6]

    call_the_roll(gloo, timedelta(minutes=1))
    if rank == 0:
        missing = ""
        try:
            call_the_roll(gloo, timedelta(seconds=2))
        except RuntimeError as error:
            missing = str(error)
        assert "Ranks 1 failed to pass monitoredBarrier" in missing
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
