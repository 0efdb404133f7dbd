import os
import warnings

import torch
import torch.distributed as dist

from instruments.cases import run_cases


def add_up(rank: int, factor: int, offset: int) -> tuple[int, int]:
    warnings.warn("of no interest", stacklevel=1)
    total = torch.tensor(factor * rank + offset)
    dist.all_reduce(total)
    return total.item(), os.getpid()


def test_each_case_has_the_results_of_all_ranks_from_one_launch():
    found = run_cases(add_up, 2, [(1, 0), (10, 1)])
    assert [[total for total, _ in ranks] for ranks in found] == [[1, 1], [12, 12]]
    first, second = ([process for _, process in ranks] for ranks in found)
    assert first == second
