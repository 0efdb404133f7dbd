"""What each of three ranks says when one of them does something else than the others.

Over Gloo, with a timeout of seconds: so a fault shows what it looks like from each rank.
"""

import re
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from miniddp.launch import RanksFailed, run_ranks
from miniddp.process import device, init_process_group

TIMEOUT = 2
"""Seconds that a collective may take."""
WIDTH = 28
"""Characters of a line, so that three ranks fit beside each other."""
KNOWN = (
    r"Connection \w+ by peer|Timed out waiting|killed by SIGKILL|can't allocate memory"
)
Work = Callable[[int], None]


def witnesses_of(work: Work, detail: bool = False) -> list[str]:
    """What each of three ranks says while all call `work(rank)`, in short lines.

    A rank that raises says its error; of one that is killed it is said here. `detail`:
    the ranks compare every call, as with `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
    """
    try:
        ranks = run_ranks(_watched, 3, work, detail, backend=None, timeout=30)
        said = ranks.outputs
    except RanksFailed as failure:
        said = failure.outputs
        for rank, text in failure.tracebacks.items():
            if "was killed" in text:
                first = text.splitlines()[0]
                said[rank] = f"({first.removesuffix('; its last output:')})"
    return [re.sub(r"(?m)^\[rank\d\]:\[E.*\n?", "", text).strip() for text in said]


def gist(said: str) -> str:
    """The words of what a rank says that one would search for, or "no error"."""
    found = re.search(KNOWN, " ".join(said.split()))
    return found[0] if found else "no error"


def say(text: str) -> None:
    """Print at once, in lines of `WIDTH` characters."""
    print(textwrap.fill(text, WIDTH, subsequent_indent="  "), flush=True)


def _watched(rank: int, work: Work, detail: bool) -> None:
    if detail:  # in a program of its own it is the variable
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    torch.zeros(1, device=device())  # a GPU takes some time to start
    init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    try:
        dist.barrier()  # another rank may be gone before this one has left it
        work(rank)
    except Exception as error:
        is_of_gloo = isinstance(error, RuntimeError) and "llocat" not in str(error)
        if not is_of_gloo:
            say(f"own error: {short(error).partition(' Error code')[0]}")
            raise
        say(short(error))
        time.sleep(TIMEOUT + 1)  # this rank's end would be an error of the others


def short(error: Exception) -> str:
    """An error of Gloo without file names, ports and advice."""
    text = re.sub(r"^\[/\S+ ", "", str(error))
    text = re.sub(r" This is typically caused.*", "", text)
    text = re.sub(r":\d{2,5}(?=[ :.]|$)", "", text)
    text = re.sub(r", TensorDeviceTypes=.*?\)\)\)", ", …)", text)
    text = re.sub(r"\.Collectives differ.*", ".", text)
    text = text.replace("FingerPrint(", "FingerPrint( ")
    return f"{type(error).__name__}: {text.splitlines()[0]}"
