"""What the Hugging Face hub has, from its cache on this machine or by network."""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

TIMEOUT_SECONDS = 5.0
logger = logging.getLogger(__name__)
T = TypeVar("T")


class Repository(NamedTuple):
    """One of the hub's, of a `kind` ("model", "dataset"), at a commit."""

    id: str
    revision: str
    kind: str


def from_hub(what: str, repository: Repository, load: Callable[[bool], T]) -> T | None:
    """`load(True)` from the cache alone, else `load(False)` by network too.

    None and a warning if neither has it all.
    """
    try:
        return load(True)
    except (OSError, ValueError):  # of whichever file is not in the cache
        problem = hub_problem(repository)
    if problem is None:
        try:
            return load(False)
        except OSError as error:
            problem = str(error)
    short = " ".join(problem.split())[:200]
    logger.warning("no %s in the hub's cache here, nor from the hub: %s", what, short)
    return None


@functools.cache
def hub_problem(repository: Repository) -> str | None:
    """Why the hub cannot be asked for it; None if it can.

    One question, of 5 seconds: a download would try again for minutes. With
    `HF_HUB_OFFLINE` the hub's client asks nobody, and says so.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(
            repository.id,
            revision=repository.revision,
            repo_type=repository.kind,
            timeout=TIMEOUT_SECONDS,
        )
    except Exception as error:  # its client's own: requests', or httpx's
        return str(error) or type(error).__name__
    return None
