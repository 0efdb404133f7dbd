"""Stage 9: a script to take to work, in plain PyTorch. Stopped, it goes on.

torchrun --standalone --nproc_per_node=2 stages/9_train.py
torchrun --standalone --nproc_per_node=8 stages/9_train.py --amp --batch 288
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group, or this holds it for ever
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler

from shakespeare import build_language_model, load_text

LOOK_EVERY = 10  # steps: to see a loss, Python waits for the device
signals = []  # that this process has received


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)  # `together` shows it, once


def parse_arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    steps = int(os.environ.get("STEPS", "183"))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=36, help="of all ranks")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=0, help="steps")
    parser.add_argument("--clip", type=float, default=0, help="largest norm")
    parser.add_argument("--amp", action="store_true", help="compute in bf16")
    parser.add_argument("--workers", type=int, default=0, help="of each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, help="folder to save to")
    parser.add_argument("--every", type=int, default=50, help="steps to a save")
    parser.add_argument("--ddp", choices=["torch", "miniddp"], default="torch")
    options = parser.parse_args()
    if min(options.steps, options.accumulation, options.every) < 1:
        raise ValueError("--steps, --accumulation and --every: at least 1")
    if min(options.learning_rate, options.warmup, options.clip) < 0:
        raise ValueError("--learning-rate, --warmup and --clip: at least 0")
    shares = dist.get_world_size() * options.accumulation
    if options.batch < 1 or options.batch % shares:
        raise ValueError(f"--batch must be a multiple of {shares}")
    return options


def start():
    """Join the group that torchrun describes; this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return device
    dist.init_process_group("nccl", device_id=device)
    return device


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def refuse(problem):
    """End the job with one line. Every rank calls it."""
    log(f"error: {problem}")
    dist.barrier()  # torchrun stops the others as soon as one rank ends
    os._exit(1)  # at once: a signal would disturb Python's own end


def together(work, *arguments):
    """This rank's `work(*arguments)`. If it fails on any rank, all end."""
    result = None
    problem = None
    try:
        result = work(*arguments)
    except Exception as error:
        problem = " ".join(str(error).split())[:300]
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, problem in enumerate(problems):
        if problem is not None:
            refuse(f"rank {rank}, {work.__name__}: {problem}")
    return result


def alike(value):
    """The value, if all ranks have the same. If not, all end."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, found in enumerate(values):
        if found != values[0]:
            refuse(f"rank {rank} has {found}, but rank 0 has {values[0]}")
    return value


def build_loader(sequences, options, device):
    """This rank's micro-batches of an epoch."""
    sampler = DistributedSampler(sequences, seed=options.seed, drop_last=True)
    loader = DataLoader(
        sequences,
        options.batch // dist.get_world_size() // options.accumulation,
        sampler=sampler,
        drop_last=True,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own; seeded for each epoch
    )
    if len(loader) < options.accumulation:
        raise ValueError(f"{len(sequences)} sequences fill no global batch")
    return loader


def own_seed(options, number):
    """Of an epoch or a step: another one on each rank."""
    return options.seed + 1 + number * dist.get_world_size() + dist.get_rank()


def micro_batches(loader, options, step):
    """Those of each step after this one, with random numbers of its own."""
    steps_of_epoch = len(loader) // options.accumulation
    epoch, done = divmod(step, steps_of_epoch)
    while True:
        loader.sampler.set_epoch(epoch)
        loader.generator.manual_seed(own_seed(options, epoch))
        iterator = iter(loader)
        for step in range(steps_of_epoch):
            torch.manual_seed(own_seed(options, epoch * steps_of_epoch + step))
            batches = [next(iterator) for _ in range(options.accumulation)]
            if step >= done:  # else it was only to be read again
                yield batches
        epoch += 1
        done = 0


def wrap(model, ddp):
    """In torch's class, or in the one that the book builds."""
    if ddp == "torch":
        return torch.nn.parallel.DistributedDataParallel(model)
    from miniddp import DistributedDataParallel

    return DistributedDataParallel(model)


def loss_of(model, batch, options):
    """The mean loss of some sequences."""
    device = next(model.parameters()).device
    batch = batch.to(device, non_blocking=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=options.amp):
        return model(input_ids=batch, labels=batch).loss


def accumulate(model, batch, options):
    """Add the gradient of a part of the step's loss to those that are there."""
    loss = loss_of(model, batch, options) / options.accumulation
    loss.backward()
    return loss.detach()


def train_step(model, optimizer, batches, options):
    """One update of the weights; this rank's loss before it, on its device."""
    *first, last = batches
    with model.no_sync():
        losses = [accumulate(model, batch, options) for batch in first]
    losses.append(accumulate(model, last, options))
    if options.clip:
        clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


@torch.no_grad()
def exchange(step, loss, model):
    """The ranks' mean loss, and whether one was told to leave: then all do."""
    norm = get_total_norm(model.parameters())
    values = torch.stack([loss, norm, torch.full_like(norm, bool(signals))])
    dist.all_reduce(values)
    if not values.isfinite().all():
        refuse(f"at step {step}: the loss or a weight is not finite")
    loss, _, told = (values / dist.get_world_size()).tolist()
    return loss, told > 0


@torch.no_grad()
def evaluate(model, sequences, options):
    """The mean loss of all sequences, whatever the number of ranks."""
    positions = range(dist.get_rank(), len(sequences), dist.get_world_size())
    total = torch.zeros((), device=next(model.parameters()).device)
    model.eval()
    for part in DataLoader(sequences, 36, sampler=positions):
        total += loss_of(model, part, options) * len(part)
    model.train()
    dist.all_reduce(total)
    return total.item() / len(sequences)


def digest(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def save(folder, state):
    """Rank 0 writes a checkpoint, whole or not at all, and keeps two."""
    if dist.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"unfinished-{os.getpid()}"
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        name = f"step-{state['step']:08d}-{digest(unfinished)}.pt"
        unfinished.replace(folder / name)
    finally:
        unfinished.unlink(missing_ok=True)
    old = sorted(folder.glob("step-*.pt"))[:-2]
    old += folder.glob("unfinished-*")  # of a job that was killed
    for path in old:
        path.unlink()


def newest(folder):
    """The newest checkpoint that is whole."""
    found = sorted(folder.glob("step-*.pt"), reverse=True)
    for path in found:
        if path.stem.endswith(digest(path)):
            return path
        log(f"skipped {path}: it is damaged")
    if found:
        raise ValueError(f"no checkpoint in {folder} is whole")
    return None


def load(path, objects, options):
    """Go on from a checkpoint; the steps that it has seen."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for name in ("batch", "seed"):  # from these and the step follows the place
        if state[name] != getattr(options, name):
            raise ValueError(f"{path} was saved with --{name} {state[name]}")
    for name, part in objects.items():
        part.load_state_dict(state[name])
    return state["step"]


def main():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    device = start()
    options = alike(together(parse_arguments))
    train, test = together(load_text)
    loader = together(build_loader, train, options, device)
    torch.manual_seed(options.seed)
    model = build_language_model().to(device)
    ddp = wrap(model, options.ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    factor = 1 / (options.warmup + 1)
    scheduler = LinearLR(optimizer, factor, total_iters=options.warmup)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    folder = options.checkpoints
    path = alike(together(newest, folder)) if folder else None
    step = together(load, path, objects, options) if path else 0
    log(f"starts after step {step}")
    batches = micro_batches(loader, options, step)
    leaving = False
    while step < options.steps and not leaving:
        loss = train_step(ddp, optimizer, next(batches), options)
        scheduler.step()
        step += 1
        is_due = step % options.every == 0 or step == options.steps
        if is_due or step % LOOK_EVERY == 0:
            loss, leaving = exchange(step, loss, model)
            log(f"step {step:3}  loss {loss:.4f}")
        if is_due:
            log(f"held-out loss {evaluate(model, test, options):.4f}")
        if folder and (is_due or leaving):
            state = {name: part.state_dict() for name, part in objects.items()}
            facts = {"step": step, "batch": options.batch, "seed": options.seed}
            together(save, folder, state | facts)
    log(f"ends after step {step} of {options.steps}")
    del ddp  # after its group it can hang: torch waits for gloo
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
