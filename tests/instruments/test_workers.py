import torch

from instruments.workers import draw
from miniddp import run_ranks


def test_workers_take_their_seeds_from_the_generator_or_from_the_rank():
    def seeded(number: int) -> torch.Generator:
        return torch.Generator().manual_seed(number)

    def draws_of(rank: int) -> dict[str, list[float]]:
        return {
            "seed 0": draw(rank, 0, None),
            "seed 0 again": draw(rank, 0, None),
            "seed 1": draw(rank, 1, None),
            "generator 0": draw(rank, 1, lambda rank: seeded(0)),
            "generator of the rank": draw(rank, 1, seeded),
        }

    first, second = run_ranks(draws_of, 2)
    assert len(first["seed 0"]) == 4, "half of the eight samples"
    assert len(set(first["seed 0"])) == 4, "the two workers draw different numbers"
    assert first["seed 0"] == first["seed 0 again"] == first["generator 0"]
    assert first["seed 0"] != first["seed 1"]
    assert first["seed 1"] == second["seed 1"]
    assert first["generator of the rank"] != second["generator of the rank"]
