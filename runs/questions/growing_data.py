"""A dataset that has grown needs a new sampler.

python runs/questions/growing_data.py
"""

import contextlib

from torch.utils.data import DistributedSampler

data = list(range(6))
sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
assert list(sampler) == [0, 2, 4]

data += [6, 7, 8, 9]
with contextlib.suppress(AssertionError):  # torch 2.13 fails here
    assert len(list(sampler)) < len(data) // 2  # others leave data out
sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
assert list(sampler) == [0, 2, 4, 6, 8]
