"""Stage 9: the whole script. It can be stopped, resumed and put on GPUs.

torchrun --standalone --nproc_per_node=2 stages/9_train.py
torchrun --standalone --nproc_per_node=8 stages/9_train.py --amp --batch 288
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from miniddp import DistributedDataParallel, DistributedSampler, set_seed
from miniddp.accumulation import global_mean
from miniddp.process import destroy_process_group, device, init_process_group
from miniddp.replicate import verify_replicas
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
    parser.add_argument("--clip", type=float, help="largest gradient norm")
    parser.add_argument("--amp", action="store_true", help="compute in bf16")
    parser.add_argument(
        "--checkpoints", help="folder to save to and go on from"
    )
    parser.add_argument("--every", type=int, default=50, help="steps")
    options = parser.parse_args()
    shares = dist.get_world_size() * options.accumulation
    if options.batch % shares:
        parser.error(f"--batch must be a multiple of {shares}")
    return options


def build_loader(sequences, options):
    """This rank's micro-batches of an epoch."""
    return DataLoader(
        sequences,
        options.batch // dist.get_world_size() // options.accumulation,
        sampler=DistributedSampler(sequences, drop_last=True),
        drop_last=True,
        pin_memory=device().type == "cuda",
        generator=torch.Generator(),  # its own; seeded for each epoch
    )


class Batches:
    """This rank's micro-batches of each step, and its place in them."""

    def __init__(self, loader, accumulation):
        self.loader = loader
        self.accumulation = accumulation
        self.epoch = 0
        self.steps = 0  # of this epoch

    def __next__(self):
        if self.steps == 0:
            self.begin_epoch()
        batches = [next(self.iterator) for _ in range(self.accumulation)]
        self.steps += 1
        if self.steps == len(self.loader) // self.accumulation:
            self.epoch += 1
            self.steps = 0
        return batches

    def begin_epoch(self):
        """Another order, and other random numbers for the loader's workers."""
        self.loader.sampler.set_epoch(self.epoch)
        seed = self.epoch * dist.get_world_size() + dist.get_rank()
        self.loader.generator.manual_seed(seed)
        self.iterator = iter(self.loader)

    def state_dict(self):
        return {"epoch": self.epoch, "steps": self.steps}

    def load_state_dict(self, state):
        """Read again what was read of the epoch: then all goes on as before."""
        self.epoch = state["epoch"]
        for _ in range(state["steps"]):
            next(self)


def predict(model, batch, amp):
    """The loss and the logits of some sequences."""
    batch = batch.to(device(), non_blocking=True)
    with torch.autocast(device().type, torch.bfloat16, enabled=amp):
        return model(input_ids=batch, labels=batch)


def accumulate(model, batch, options):
    """Add the gradient of a part of the step's loss to those that are there."""
    loss = predict(model, batch, options.amp).loss / options.accumulation
    loss.backward()
    return loss.detach()


def train_step(model, optimizer, micro_batches, options):
    """One update of the weights; this rank's loss before it, on its device."""
    *first, last = micro_batches
    with model.no_sync():
        losses = [accumulate(model, batch, options) for batch in first]
    losses.append(accumulate(model, last, options))
    if options.clip is not None:
        clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model, sequences, options):
    """The mean loss, and the share of the next tokens that it finds."""
    model.eval()
    positions = shard(len(sequences), dist.get_world_size(), dist.get_rank())
    total = torch.zeros(2, device=device())
    for part in DataLoader(sequences, 36, sampler=positions):
        found = predict(model, part, options.amp)
        right = found.logits[:, :-1].argmax(2) == part[:, 1:].to(device())
        total += torch.stack([found.loss, right.float().mean()]) * len(part)
    model.train()
    return global_mean(total, len(positions)).tolist()


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def warmup_factor(warmup, step):
    return min(1.0, (step + 1) / (warmup + 1))


def random_state():
    """Of torch's generators, from which dropout draws, on CPU and GPU."""
    on_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_rng_state() if on_gpu else None
    return {"cpu": torch.get_rng_state(), "gpu": gpu}


def set_random_state(state):
    torch.set_rng_state(state["cpu"])
    if state["gpu"] is not None:
        torch.cuda.set_rng_state(state["gpu"])


def save(folder, step, objects):
    """Rank 0 writes a checkpoint, whole or not at all, and keeps two."""
    is_rank_0 = dist.get_rank() == 0
    random_states = [None] * dist.get_world_size() if is_rank_0 else None
    dist.gather_object(random_state(), random_states, dst=0)
    if not is_rank_0:
        return
    state = {name: part.state_dict() for name, part in objects.items()}
    state["step"] = step
    state["random_states"] = random_states
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "unfinished.pt"
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / f"step-{step:08d}.pt")
    for old in sorted(folder.glob("step-*.pt"))[:-2]:
        old.unlink()


def resume(folder, objects):
    """Load the newest checkpoint, if there is one; the steps it has seen."""
    newest = [max(Path(folder).glob("step-*.pt"), default=None)]
    dist.broadcast_object_list(newest, src=0)  # rank 0 says which it is
    if newest[0] is None:
        return 0
    state = torch.load(newest[0], "cpu", weights_only=True, mmap=True)
    ranks = len(state["random_states"])
    if ranks != dist.get_world_size():
        raise ValueError(f"{newest[0]} was saved on {ranks} ranks")
    for name, part in objects.items():
        part.load_state_dict(state[name])
    verify_replicas(objects["model"])
    set_random_state(state["random_states"][dist.get_rank()])
    log(f"resumed after step {state['step']}")
    return state["step"]


def main():
    init_process_group()
    options = parse_arguments()
    train, test = load_text()
    set_seed(0)
    model = build_language_model().to(device())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    scheduler = LambdaLR(optimizer, partial(warmup_factor, options.warmup))
    batches = Batches(build_loader(train, options), options.accumulation)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": batches,
    }
    folder = options.checkpoints
    first = resume(folder, state) if folder else 0
    start = time.perf_counter()
    for step in range(first + 1, options.steps + 1):
        loss = train_step(ddp, optimizer, next(batches), options)
        scheduler.step()
        if step % 20 == 0 or step == options.steps:
            log(f"step {step:3}  loss {global_mean(loss, 1).item():.4f}")
        if folder and (step % options.every == 0 or step == options.steps):
            save(folder, step, state)
    seconds = time.perf_counter() - start
    if options.steps > first:
        tokens = (options.steps - first) * options.batch * (train.shape[1] - 1)
        log(f"{tokens / seconds:.0f} tokens a second")
    loss, right = evaluate(model, test, options)
    log(f"held-out loss {loss:.4f}, right in {right:.1%} of the next tokens")
    del ddp  # torch's class in its place would hold the group
    destroy_process_group()


if __name__ == "__main__":
    main()
