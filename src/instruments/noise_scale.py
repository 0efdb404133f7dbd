"""Where more samples in a batch stop saving steps: the critical batch size.

McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Curve(NamedTuple):
    """Steps to a loss: `fewest * (1 + critical / batch)`, both numbers fitted."""

    fewest: float
    critical: float


def fit_steps(batches: Sequence[int], steps: Sequence[float]) -> Curve:
    """The curve that comes nearest to measured steps, by squared relative distances."""
    taken = torch.tensor(steps, dtype=torch.float32).unsqueeze(1)
    terms = torch.tensor([[1, 1 / batch] for batch in batches]) / taken
    solution = torch.linalg.lstsq(terms, torch.ones_like(taken)).solution
    fewest, slope = solution.flatten().tolist()
    return Curve(fewest, slope / fewest)
