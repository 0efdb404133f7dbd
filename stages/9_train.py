"""Stage 9: the whole script. It can be stopped, resumed and put on GPUs.

torchrun --standalone --nproc_per_node=2 stages/9_train.py
torchrun --standalone --nproc_per_node=8 stages/9_train.py --amp --batch 288
"""

import argparse
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from finetune.checkpoint import latest, load, save
from miniddp import DistributedDataParallel, DistributedSampler, set_seed
from miniddp.accumulation import global_mean
from miniddp.process import destroy_process_group, device, init_process_group
from miniddp.sampler import shard
from shakespeare import build_language_model, load_text


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = int(os.environ.get("STEPS", "183"))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=36, help="of all ranks")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=0, help="steps")
    parser.add_argument("--clip", type=float, default=float("inf"))
    parser.add_argument("--amp", action="store_true", help="compute in bf16")
    parser.add_argument(
        "--checkpoints", help="folder to save to and go on from"
    )
    parser.add_argument("--every", type=int, default=50, help="steps")
    options = parser.parse_args()
    parts = dist.get_world_size() * options.accumulation
    if options.batch % parts:
        parser.error(f"--batch must be a multiple of {parts}")
    return options


def build_loader(sequences, options):
    """This rank's micro-batches."""
    return DataLoader(
        sequences,
        options.batch // dist.get_world_size() // options.accumulation,
        sampler=DistributedSampler(sequences, drop_last=True),
        drop_last=True,
        pin_memory=device().type == "cuda",
        generator=torch.Generator().manual_seed(dist.get_rank()),  # its own
    )


def batches(loader, accumulation):
    """The micro-batches of each step, from where the sampler stands."""
    while True:
        parts = iter(loader)
        yield from zip(*[parts] * accumulation, strict=False)
        loader.sampler.set_epoch(loader.sampler.epoch + 1)


def predict(model, part, amp):
    """The loss and the logits of some sequences."""
    part = part.to(device(), non_blocking=True)
    with torch.autocast(device().type, torch.bfloat16, enabled=amp):
        return model(input_ids=part, labels=part)


def accumulate(model, part, options):
    """Add the gradient of a part of the step's loss to those that are there."""
    loss = predict(model, part, options.amp).loss / options.accumulation
    loss.backward()
    return loss.detach()


def train_step(model, optimizer, parts, options):
    """One update of the weights; this rank's loss before it, on its device."""
    with model.no_sync():
        losses = [accumulate(model, part, options) for part in parts[:-1]]
    losses.append(accumulate(model, parts[-1], options))
    clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model, sequences, options):
    """The mean loss, and the share of the next tokens that it finds."""
    model.eval()
    own = shard(len(sequences), dist.get_world_size(), dist.get_rank())
    total = torch.zeros(2, device=device())
    for part in DataLoader(sequences, 36, sampler=own):
        found = predict(model, part, options.amp)
        right = found.logits[:, :-1].argmax(2) == part[:, 1:].to(device())
        total += torch.stack([found.loss, right.float().mean()]) * len(part)
    model.train()
    return global_mean(total, len(own)).tolist()


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def warmup_factor(warmup, step):
    return min(1.0, (step + 1) / (warmup + 1))


def resume(options, state):
    """Load the newest checkpoint, if there is one; the steps it has seen."""
    path = latest(options.checkpoints) if options.checkpoints else None
    if path is None:
        return 0
    step = load(path, state)
    log(f"resumed after step {step}")
    return step


def main():
    init_process_group()
    options = parse_arguments()
    train, test = load_text()
    set_seed(0)
    model = build_language_model().to(device())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    warm = partial(warmup_factor, options.warmup)
    scheduler = LambdaLR(optimizer, warm)
    loader = build_loader(train, options)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state["sampler"] = loader.sampler
    first = resume(options, state)
    todo = batches(loader, options.accumulation)
    start = time.perf_counter()
    for step in range(first + 1, options.steps + 1):
        loss = train_step(ddp, optimizer, next(todo), options)
        scheduler.step()
        if step % 20 == 0 or step == options.steps:
            log(f"step {step:3}  loss {global_mean(loss, 1).item():.4f}")
        due = step % options.every == 0 or step == options.steps
        if options.checkpoints and due:
            save(options.checkpoints, step, state, keep=2)
    seconds = time.perf_counter() - start
    if options.steps > first:
        tokens = (options.steps - first) * options.batch * (train.shape[1] - 1)
        log(f"{tokens / seconds:.0f} tokens a second")
    loss, right = evaluate(model, test, options)
    log(f"held-out loss {loss:.4f}, right in {right:.1%} of the next tokens")
    destroy_process_group()


if __name__ == "__main__":
    main()
