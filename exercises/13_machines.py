"""Exercise 13: call the roll.

Before a step that all ranks take together, find out who is missing and
who is about to do something else, and say it on every rank.

- `store.set(key, text)` writes. `store.get(key)` returns bytes, and waits
  for the key: it raises `dist.DistStoreError` when the store's timeout is
  over. `store.wait([key], timeout)` waits as long as you say.
- Waiting `timeout` for each missing rank in turn would take too long:
  all of them share one deadline.
- `store.compare_set(key, "", text)` writes unless somebody has written, and
  returns, as bytes, what is there then.
- A roll call can be repeated under another name.
"""

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
    """Return when all ranks have called this with the same `plan`.

    Otherwise raise `RollCallError`: `missing: ranks 1, 3` if they have not
    come within `timeout`, or `rank 2: broadcast, rank 0: all_reduce`,
    with the first rank whose plan differs from that of rank 0. Missing
    ranks come first. Who decides first decides for all: each rank returns,
    or all raise the same text, also those that come later.
    """
    raise NotImplementedError("exercise 13: call the roll")
