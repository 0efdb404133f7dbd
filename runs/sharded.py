"""Stage 7, sharded: a rank keeps its part of weights, gradients, state.

torchrun --standalone --nproc_per_node=2 runs/sharded.py
"""

import sys
from importlib import import_module
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from miniddp.process import destroy_process_group, device, init_process_group
from miniddp.replicate import broadcast_module

sys.path.append("stages")  # it is started in the repository's folder
stage_7 = import_module("7_ddp")
STEPS = stage_7.STEPS
build_language_model = stage_7.build_language_model
load_text = stage_7.load_text
batches = stage_7.batches
report = stage_7.report
evaluate = stage_7.evaluate


def main():
    init_process_group()
    torch.manual_seed(dist.get_rank())  # each rank draws numbers of its own
    model = build_language_model().to(device())
    broadcast_module(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, test = load_text()
    for step, part in enumerate(islice(batches(train), STEPS), start=1):
        part = part.to(device())
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS:
            report(step, loss)
    evaluate(model, test)
    destroy_process_group()


if __name__ == "__main__":
    main()
