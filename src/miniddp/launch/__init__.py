"""Ranks on this machine, from Python: `run_ranks` calls a function on each."""

from miniddp.launch.ranks import (
    RankResults,
    RanksFailed,
    RanksTimedOut,
    run_ranks,
)

__all__ = ["RankResults", "RanksFailed", "RanksTimedOut", "run_ranks"]
