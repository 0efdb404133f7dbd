"""Case 7: every rank reads all the data."""

from torch.utils.data import DataLoader, DistributedSampler

from miniddp import set_seed

SAMPLES = 32


def read_everything(rank: int) -> list[int]:
    set_seed(0)
    loader = DataLoader(range(SAMPLES), batch_size=4, shuffle=True)
    return [sample for batch in loader for sample in batch.tolist()]


def read_own_part(rank: int) -> list[int]:
    set_seed(0)
    sampler = DistributedSampler(range(SAMPLES), shuffle=True)
    loader = DataLoader(range(SAMPLES), batch_size=4, sampler=sampler)
    return [sample for batch in loader for sample in batch.tolist()]
