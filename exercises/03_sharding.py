"""Exercise 3: batches of similar length, for every rank.

Samples of similar length in one batch need little padding. Ranks with
batches of similar length in one step wait little for each other.

- Every rank computes the same plan, then takes its part of it.
- Leave out what does not fill a global batch before you sort. Otherwise
  it is always the longest samples that nobody trains on.
- Shuffle the global batches at the end: a training that goes from short
  to long samples is another training.
"""

from collections.abc import Sequence


def batches_of_rank(
    lengths: Sequence[int],
    batch_size: int,
    world_size: int,
    rank: int,
    seed: int = 0,
    epoch: int = 0,
) -> list[list[int]]:
    """The batches of `rank` in one epoch, as positions in `lengths`.

    All ranks get the same number of batches, all of `batch_size` samples.
    No sample comes twice; fewer than `world_size * batch_size` are left
    out, others in another epoch. The result depends on the arguments
    alone.
    """
    raise NotImplementedError("exercise 3: cut the data into batches")
