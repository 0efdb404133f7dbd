"""Loads the exercise that a test is about: yours, or with EXERCISE_DIR=exercises/solutions ours."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import cloudpickle
import torch
from torch import Tensor

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    """The module `name`.py, in a form that `run_ranks` can carry to its ranks."""
    folder = Path(os.environ.get("EXERCISE_DIR", HERE)).resolve()
    path = folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"exercise_{name}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no exercise {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def check_close(
    found: Tensor, wanted: Tensor, name: str, mistakes: Mapping[str, Tensor] | None = None
) -> None:
    """Raise `AssertionError` that says how `found` is wrong, if not by rounding alone.

    `mistakes` holds what often comes in place of `wanted`, by its description.
    """
    if not is_close(found, wanted):
        raise AssertionError(f"{name} is {what_is_wrong(found, wanted, mistakes or {})}")


def is_close(found: Tensor, wanted: Tensor) -> bool:
    try:
        torch.testing.assert_close(found, wanted)
    except AssertionError:
        return False
    return True


def what_is_wrong(found: Tensor, wanted: Tensor, mistakes: Mapping[str, Tensor]) -> str:
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{found.dtype} of {list(found.shape)}, not {wanted.dtype} of {list(wanted.shape)}"
    if found.isnan().any():
        return "not a number (NaN)"
    for description, tensor in {**mistakes, "what was expected": wanted}.items():
        factor = (found * tensor).sum().item() / tensor.square().sum().item()
        if is_close(found, factor * tensor):
            return description if round(factor, 6) == 1 else f"{factor:.3g} times {description}"
    place = (found - wanted).abs().argmax()
    came, expected = found.flatten()[place], wanted.flatten()[place]
    return f"{came:.6g} at its element {place}, expected {expected:.6g}"
