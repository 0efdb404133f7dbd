"""A step repaired, traced from inside a training, and timed by the class itself.

torchrun --standalone --nproc_per_node=2 runs/pytorch/10_profile.py
"""

import gzip
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule, tensorboard_trace_handler


def repair(model, gpus=None, backend="inductor"):
    model.compile(backend=backend)
    ddp = DistributedDataParallel(
        model,
        device_ids=gpus,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
    return ddp, optimizer


def train(train_step, batches, folder="traces"):
    plan = schedule(skip_first=5, wait=1, warmup=2, active=5, repeat=1)
    save = tensorboard_trace_handler(folder, use_gzip=True)
    with profile(schedule=plan, on_trace_ready=save) as profiler:
        for batch in batches:
            train_step(batch)
            profiler.step()


def exposed_ms(ddp):
    """Of backward, in the last step that the class has timed."""
    data = ddp._get_ddp_logging_data()
    sent = data["backward_comm_time"]
    hidden = data["backward_compute_comm_overlap_time"]
    return (sent - hidden) / 1e6


def build():
    torch.manual_seed(0)
    first = nn.Linear(64, 64, bias=False)  # batch normalisation takes it off
    return nn.Sequential(first, nn.BatchNorm1d(64), nn.Linear(64, 1))


def check(model):
    """The same steps with and without the remedies."""
    plain = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(plain.parameters())
    # The backend "eager" compiles nothing, so the test needs no compiler.
    repaired, repaired_optimizer = repair(model, backend="eager")

    def train_step(batch):
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        repaired(batch).square().mean().backward()
        gradient = model[2].weight.grad
        assert gradient.untyped_storage().nbytes() > gradient.nbytes  # of a bucket
        repaired_optimizer.step()
        repaired_optimizer.zero_grad()

    batches = torch.rand(24, 16, 64) + dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        train(train_step, batches, folder)
        (file,) = Path(folder).iterdir()
        trace = json.loads(gzip.decompress(file.read_bytes()))
    names = {event["name"] for event in trace["traceEvents"]}
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{step}" for step in range(8, 13)}
    assert trace["distributedInfo"]["rank"] == dist.get_rank()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    sent = repaired._get_ddp_logging_data()["backward_comm_time"] / 1e6
    assert 0 <= exposed_ms(repaired) <= sent


def main():
    dist.init_process_group("gloo")
    model = build()
    check(model)
    own_mean = model[1].running_mean.clone()
    dist.broadcast(own_mean, src=0)
    assert torch.equal(own_mean, model[1].running_mean) == (dist.get_rank() == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
