"""Which backend the ranks of an experiment take on this machine."""

import torch
import torch.distributed as dist

from miniddp.launch import run_ranks
from miniddp.process import init_process_group


def backend_of(world_size: int) -> str:
    """The backend of so many ranks on this machine, to start others with.

    `miniddp.process.init_process_group` chooses it, so that ranks are started to ask
    them: "cpu:gloo,cuda:nccl" if each has a GPU of its own, else "gloo".
    """
    if not torch.cuda.is_available():
        return "gloo"
    answer: str = run_ranks(_chosen, world_size, backend=None)[0]
    return answer


def _chosen(rank: int) -> str:
    init_process_group()
    return dist.get_backend()
