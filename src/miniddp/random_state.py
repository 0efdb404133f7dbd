"""The state of every random number generator that a training step may draw from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, and of that of the current GPU."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def check_random_state(state: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the state is of a machine with a GPU and this one has none, or so."""
    if (state["cuda"] is not None) != torch.cuda.is_available():
        saved, here = ("GPU", "CPU") if state["cuda"] is not None else ("CPU", "GPU")
        raise ValueError(
            f"random numbers of a {saved} cannot be continued on a {here}: "
            "shared_only=True goes on without them"
        )


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on from a state of `random_state`. Raises `ValueError` as `check_random_state`."""
    check_random_state(state)
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
