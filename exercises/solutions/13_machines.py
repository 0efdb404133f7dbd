"""Exercise 13, solved."""

import time
from datetime import timedelta

import torch.distributed as dist


class RollCallError(RuntimeError):
    """Says which ranks are missing, or which have another plan."""


def call_the_roll(
    store: dist.Store,
    name: str,
    rank: int,
    world_size: int,
    plan: str,
    timeout: timedelta,
) -> None:
    store.set(f"{name}/{rank}", plan)
    deadline = time.monotonic() + timeout.total_seconds()
    plans: dict[int, str] = {}
    for other in range(world_size):
        key = f"{name}/{other}"
        left = max(0.01, deadline - time.monotonic())
        try:
            store.wait([key], timedelta(seconds=left))
        except dist.DistStoreError:
            continue
        plans[other] = store.get(key).decode()

    missing = [str(other) for other in range(world_size) if other not in plans]
    verdict = "all agree"
    if missing:
        verdict = f"missing: ranks {', '.join(missing)}"
    else:
        for other in reversed(range(world_size)):
            if plans[other] != plans[0]:
                verdict = f"rank {other}: {plans[other]}, rank 0: {plans[0]}"
    first = store.compare_set(f"{name}/verdict", "", verdict).decode()
    if first != "all agree":
        raise RollCallError(first)
