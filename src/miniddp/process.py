"""Who am I: the process group, this rank's numbers and device, seeds."""

import torch
import torch.distributed as dist


def init_process_group(backend: str | None = None) -> None:
    dist.init_process_group(backend)
