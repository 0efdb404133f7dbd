"""How long a step takes: alone, with a message per parameter, with buckets.

torchrun --standalone --nproc_per_node=2 runs/step_on_hosts.py
"""

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from miniddp import DistributedDataParallel, SimpleDDP
from miniddp.process import destroy_process_group, init_process_group

sys.path.append("stages")  # it is started in the repository's folder
from shakespeare import build_language_model, load_text

SEQUENCES = 16
STEPS = int(os.environ.get("STEPS", "9"))


def seconds(step: Callable[[], object]) -> float:
    """The median of some steps, all ranks beginning together."""
    took = []
    for _ in range(2 + STEPS):  # two to warm up
        dist.barrier()
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return statistics.median(took[2:])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    init_process_group("gloo")
    batch = load_text()[0][:SEQUENCES]
    model = build_language_model()
    simple = SimpleDDP(copy.deepcopy(model))
    ddp = DistributedDataParallel(model)

    def forward(wrapper: torch.nn.Module) -> torch.Tensor:
        return wrapper(input_ids=batch, labels=batch).loss

    def alone() -> None:
        with ddp.no_sync():
            forward(ddp).backward()

    def message_per_parameter() -> None:
        forward(simple).backward()
        simple.sync_gradients()

    found = {
        "forward": seconds(lambda: forward(model)),
        "alone": seconds(alone),
        "simple": seconds(message_per_parameter),
        "buckets": seconds(lambda: forward(ddp).backward()),
        "parameter_bytes": [4 * p.numel() for p in model.parameters()],
        "bucket_bytes": [4 * bucket.buffer().numel() for bucket in ddp.reducer.buckets],
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    destroy_process_group()


if __name__ == "__main__":
    main()
