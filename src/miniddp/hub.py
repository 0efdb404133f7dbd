"""What comes from the hub, if it answers."""

import functools
import logging
import urllib.request
from collections.abc import Callable
from typing import TypeVar

TIMEOUT_SECONDS = 5.0
logger = logging.getLogger(__name__)
T = TypeVar("T")


def from_hub(what: str, load: Callable[[], T]) -> T | None:
    """`load()`, or None and a warning when the hub cannot give `what`.

    It must answer within 5 seconds: its own client would try for minutes. With
    `HF_HUB_OFFLINE` only the cache is looked at.
    """
    problem = hub_problem()
    if problem is None:
        try:
            return load()
        except OSError as error:
            problem = str(error)
    short = " ".join(problem.split())[:200]
    logger.warning("no %s from the hub: %s", what, short)
    return None


@functools.cache
def hub_problem() -> str | None:
    """Why the hub cannot be asked; None if it can, or its cache is used."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()
    except OSError as error:
        return f"{constants.ENDPOINT} does not answer ({error})"
    return None
