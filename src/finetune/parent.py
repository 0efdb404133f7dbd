"""The end of torchrun is that of its ranks: nobody else would stop or restart them.

It imports nothing that takes long: a rank asks for it before it imports torch.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal when the parent ends


def end_with_torchrun() -> None:
    """Let Linux kill this rank if torchrun is killed."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
