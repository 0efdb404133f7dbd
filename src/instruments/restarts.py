"""How often to save, and what failures then cost (Young, CACM 1974)."""

import math

from instruments.cost import check_amounts


def save_interval(save_seconds: float, failure_seconds: float) -> float:
    """Seconds between the checkpoints that lose least: the square root of 2 δ M.

    δ is what a checkpoint takes, M the mean time between failures. For a δ that is small
    against M. Raises `ValueError` for a negative amount.
    """
    check_amounts(save_seconds=save_seconds, failure_seconds=failure_seconds)
    return math.sqrt(2 * save_seconds * failure_seconds)


def lost_share(interval: float, save_seconds: float, failure_seconds: float) -> float:
    """The share of the time that saving takes, and that steps done twice take.

    δ / τ + τ / (2 M): a failure costs half an interval on average. The restart itself is
    not counted.
    """
    check_amounts(interval=interval, save_seconds=save_seconds)
    return save_seconds / interval + interval / (2 * failure_seconds)
