"""Is torch new enough? An older one fails later, in a line that does not say so."""

import re
from importlib.metadata import PackageNotFoundError, requires

import torch


def torch_problem() -> str | None:
    """What to do, in one line, if torch is older than the package allows."""
    try:
        needed = "\n".join(requires("miniddp") or [])
    except PackageNotFoundError:  # a copy of the sources, which says nothing
        return None
    bound = re.search(r"^torch>=([\d.]+)", needed, re.MULTILINE)
    if bound is None or torch.__version__ >= bound[1]:
        return None
    return (
        f"torch {torch.__version__} is older than {bound[1]}: "
        f"pip install --upgrade 'torch>={bound[1]}'"
    )
