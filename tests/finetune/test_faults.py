"""What may happen to a training: nothing is lost, and nothing goes wrong in silence."""

import contextlib
import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from finetune import checkpoint
from finetune.data import Batches
from finetune.job import Stopped, digest_of_code
from finetune.options import Options
from finetune.state_file import CheckpointError, read_state
from finetune.train import Result, TrainingError
from instruments.launched_jobs import is_running, ranks
from miniddp.sampler import DistributedSampler

from .training_cases import LAUNCHER, SHORT, command, environment, run_training, write_pairs

TINY = replace(SHORT, batch_size=4, max_length=8)


def file(step: int) -> str:
    return f"step-{step:08d}.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[!.]*"))


def train(options: Options, exchange_every: int = 20) -> Result:
    from finetune import train as program

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "EXCHANGE_EVERY", exchange_every)
        return program.train(options)


@contextlib.contextmanager
def after_step(number: int, what) -> Iterator[None]:
    """`what(model, loss)` after this step of a training; what it returns is the loss."""
    from finetune import training_step

    count, step = 0, training_step.train_step

    def step_and_more(model, *arguments, **options):
        nonlocal count
        count += 1
        loss = step(model, *arguments, **options)
        return what(model, loss) if count == number else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "train_step", step_and_more)
        yield


def error(options: Options, exchange_every: int = 20) -> str:
    with pytest.raises((TrainingError, CheckpointError)) as caught:
        train(options, exchange_every)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Ranks that are not alike


DIFFERENT = {
    "lr": 0.5,
    "seed": 3,
    "batch_size": 6,
    "steps": 4,
    "checkpoint_every": 2,
    "ddp": "torch",
    "elastic": True,
}


def test_options_that_differ_are_named_on_every_rank_before_anything_is_loaded(tmp_path):
    common = replace(TINY, data_dir="nowhere", checkpoint=str(tmp_path), checkpoint_every=1)

    def errors(rank):
        chosen = [replace(common, **{name: value}) for name, value in DIFFERENT.items()]
        return [error(options if rank == 1 else common) for options in chosen]

    first, second = run_training(errors, 2)
    assert first == second
    for (name, value), found in zip(DIFFERENT.items(), first, strict=True):
        here = getattr(common, name)
        assert found == f"--{name.replace('_', '-')} is {here} on rank 0, and {value} on rank 1"
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "fact", ["torch", "transformers", "SHA-256 of finetune's code", "SHA-256 of miniddp's code"]
)
def test_ranks_with_another_library_or_other_code_are_named(fact):
    def differ(rank):
        from finetune import job

        facts = job.versions()
        if rank == 1:
            job.versions = lambda: {**facts, fact: "another"}
        return error(replace(TINY, data_dir="nowhere")), facts[fact]

    for found, value in run_training(differ, 2):
        assert found == f"{fact} is {value} on rank 0, and another on rank 1"


def test_the_code_of_every_room_counts_and_its_place(tmp_path):
    room = tmp_path / "package" / "room"
    room.mkdir(parents=True)
    (room / "reducer.py").write_text("one")
    first = digest_of_code(tmp_path)
    (room / "notes.txt").write_text("no code")
    assert digest_of_code(tmp_path) == first
    (room / "reducer.py").write_text("another")
    second = digest_of_code(tmp_path)
    (room / "reducer.py").rename(tmp_path / "reducer.py")
    assert len({first, second, digest_of_code(tmp_path)}) == 3


# What is not a number


def test_a_loss_that_is_not_finite_stops_every_rank_before_it_is_saved(tmp_path):
    options = replace(TINY, steps=12, checkpoint=str(tmp_path), checkpoint_every=5)

    def broken(rank):
        with after_step(7, lambda _, loss: loss * (math.nan if rank == 1 else 1)):
            return error(options)

    for found in run_training(broken, 2):
        assert found == (
            "the loss of step 7 is not finite on rank 1; "
            f"the last good checkpoint: {tmp_path / file(5)}"
        )
    assert names(tmp_path) == [file(5)]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The loss of a step is that before its update: it does not show what the update did."""
    options = replace(TINY, steps=12, checkpoint=str(tmp_path), checkpoint_every=3)

    def spoil(model, loss):
        with torch.no_grad():
            next(model.parameters())[0, 0] = math.inf
        return loss

    def broken(rank):
        with after_step(3, spoil):
            return error(options)

    for found in run_training(broken, 2):
        assert found == (
            "a weight after step 3 is not finite on rank 0, 1; the last good checkpoint: None"
        )
    assert names(tmp_path) == []


def test_without_checkpoints_a_loss_that_is_not_finite_ends_the_training_at_the_next_look():
    def broken(rank):
        with after_step(3, lambda _, loss: loss * math.inf):
            return error(replace(TINY, steps=12), exchange_every=4)

    (found,) = run_training(broken, 1)
    assert found == "the loss of step 3 is not finite on rank 0; the last good checkpoint: None"


def test_a_learning_rate_that_is_far_too_large_is_an_error_of_the_command(tmp_path):
    arguments = ["--lr=1e29", "--steps=6", "--batch-size=4", "--max-length=8"]
    arguments += [f"--checkpoint={tmp_path}", "--checkpoint-every=1"]
    ended = command(*arguments)
    assert ended.returncode == 1
    assert " is not finite on rank 0; the last good checkpoint: " in ended.stderr.splitlines()[-1]
    for path in tmp_path.glob("step-*"):
        weights = read_state(path)[0]["shared"]["model"].values()
        assert all(bool(weight.isfinite().all()) for weight in weights)


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_saves_on_all_and_a_resume_goes_on_bit_for_bit(tmp_path, number):
    straight = replace(TINY, steps=6, checkpoint=str(tmp_path / "straight"))
    stopped = replace(straight, checkpoint=str(tmp_path / "stopped"), resume="auto")

    def send(_, loss):
        os.kill(os.getpid(), number)
        return loss

    def run(rank):
        train(straight)
        before = signal.getsignal(number)
        when = 3 if rank == 1 else 0
        with after_step(when, send), pytest.raises(Stopped) as caught:
            train(stopped, exchange_every=2)
        assert signal.getsignal(number) is before
        saved = names(tmp_path / "stopped")
        return caught.value.args, saved, train(stopped).first_step

    for found in run_training(run, 2):
        assert found == ((4, tmp_path / "stopped" / file(4)), [file(4)], 4)
    finished = [(tmp_path / name / file(6)).read_bytes() for name in ("straight", "stopped")]
    assert finished[0] == finished[1]


def test_a_signal_at_the_last_step_leaves_the_evaluation_to_the_next_start(tmp_path):
    options = replace(TINY, checkpoint=str(tmp_path), resume="auto", steps=2)

    def send(_, loss):
        os.kill(os.getpid(), signal.SIGTERM)
        return loss

    def run(rank):
        with after_step(2, send), pytest.raises(Stopped):
            train(options)
        return train(options)

    (result,) = run_training(run, 1)
    assert (result.first_step, result.losses) == (2, [])
    assert 0 <= result.accuracy <= 1


SLOW = """
import os, sys, time
from pathlib import Path
from finetune import training_step
from finetune.last_words import run
from finetune.train import main
step = training_step.train_step
def slow(*arguments, **options):
    loss = step(*arguments, **options)
    time.sleep(0.05)
    (Path(os.environ["MARKS"]) / str(os.getpid())).touch()
    return loss
training_step.train_step = slow
run(main)
"""


@contextlib.contextmanager
def training(tmp_path: Path, ranks: int | None) -> Iterator[SimpleNamespace]:
    """A long training that has taken a step on every rank, and its ranks' processes."""
    (tmp_path / "slow.py").write_text(SLOW)
    marks = tmp_path / "marks"
    marks.mkdir()
    arguments = ["--epochs=100000", "--batch-size=4", "--max-length=8", "--checkpoint-every=100000"]
    arguments += [f"--checkpoint={tmp_path / 'saved'}", "--resume=auto"]
    launcher = [*LAUNCHER, f"--nproc_per_node={ranks}"] if ranks else []
    process = subprocess.Popen(
        [sys.executable, *launcher, str(tmp_path / "slow.py"), *arguments],
        env={**environment(), "MARKS": str(marks)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(names(marks)) == (ranks or 1) or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        yield SimpleNamespace(process=process, ranks=[int(name) for name in names(marks)])
    finally:
        for number in [process.pid, *map(int, names(marks))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()


def wait_for(condition) -> None:
    """Until the test's own time limit."""
    while not condition():
        time.sleep(0.05)


def test_the_command_saves_on_sigterm_and_leaves_with_a_code_of_its_own(tmp_path):
    with training(tmp_path, ranks=None) as started:
        started.process.terminate()
        _, text = started.process.communicate()
    assert started.process.returncode == 75
    (saved,) = (tmp_path / "saved").glob("[!.]*")
    step = read_state(saved)[0]["step"]
    line = f"stopped by a signal after step {step}; the last checkpoint: {saved}"
    assert text.splitlines()[-1] == line


def test_torchrun_that_is_terminated_lets_its_ranks_save(tmp_path):
    with training(tmp_path, ranks=2) as started:
        started.process.terminate()
        _, text = started.process.communicate()
        assert not any(map(is_running, started.ranks))
    (saved,) = (tmp_path / "saved").glob("[!.]*")
    assert text.count("stopped by a signal after step ") == 1
    assert len(read_state(saved)[0]["random_states"]) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent")
def test_ranks_end_with_the_torchrun_that_started_them(tmp_path):
    with training(tmp_path, ranks=2) as started:
        started.process.kill()
        wait_for(lambda: not any(map(is_running, started.ranks)))
        wait_for(lambda: is_free(tmp_path / "saved"))
    assert names(tmp_path / "saved") == []


def imports_torch(pid: int) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent")
def test_ranks_that_still_import_torch_end_with_the_torchrun_that_started_them():
    arguments = ["--nproc_per_node=2", "-m", "finetune", "--epochs=100000", "--max-length=8"]
    launcher = subprocess.Popen(
        [sys.executable, *LAUNCHER, *arguments], env=environment(), stderr=subprocess.DEVNULL
    )
    wait_for(lambda: len(ranks(launcher.pid)) == 2)
    started = ranks(launcher.pid)
    try:
        wait_for(lambda: all(map(imports_torch, started)))
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not any(map(is_running, started)))
    finally:
        launcher.kill()
        for pid in filter(is_running, started):
            os.kill(pid, signal.SIGKILL)


# Two trainings, one folder


@contextlib.contextmanager
def checkpoint_lock(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_free(folder: Path) -> bool:
    try:
        with checkpoint_lock(folder):
            return True
    except BlockingIOError:  # the last threads of a killed process still hold it
        return False


def test_a_folder_that_another_training_uses_is_refused_until_that_has_ended(tmp_path):
    options = replace(TINY, steps=1, checkpoint=str(tmp_path))
    (tmp_path / "step-00000007.safetensors.1-a.unfinished").mkdir()
    with checkpoint_lock(tmp_path):
        found = run_training(lambda rank: error(options), 2)
        assert names(tmp_path) == ["step-00000007.safetensors.1-a.unfinished"]
    assert list(found) == [f"cannot use {tmp_path}: rank 0: another training is using it"] * 2
    run_training(lambda rank: train(options), 2)
    assert names(tmp_path) == [file(1)]


def test_two_that_save_the_same_step_at_once_do_not_share_a_file(tmp_path, monkeypatch):
    """The second saves while the first is about to rename; without the lock."""
    from finetune.state_file import write_state

    rename, states = Path.replace, iter(["second"])

    def disturbed(self, target):
        for state in states:
            write_state(tmp_path / "a", state)
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", disturbed)
    write_state(tmp_path / "a", "first")
    assert read_state(tmp_path / "a")[0] == "first"
    assert names(tmp_path) == ["a"]


# Ranks that do not answer, starts that cannot help


def test_a_rank_that_stands_still_is_noticed_after_the_timeout(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "from finetune import training_step\n"
        "from finetune.last_words import run\n"
        "from finetune.train import main\n"
        "step = training_step.train_step\n"
        "def stop(*arguments, **options):\n"
        "    if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return step(*arguments, **options)\n"
        "training_step.train_step = stop\n"
        "run(main)\n"
    )
    ended = command("--timeout=15", "--batch-size=4", ranks=2, program=[str(program)])
    assert ended.returncode == 1
    assert "Timed out waiting 15000ms" in ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("the others wait for")]
    assert said[0].startswith("the others wait for rank 1 (last heard of in ")
    assert ended.stderr.count(said[0]) > 1  # the end of torchrun's report has it too


def test_an_error_that_no_restart_mends_is_met_once(tmp_path):
    """torchrun starts the ranks twice; they load their data the first time."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from finetune import train\n"
        "from finetune.last_words import run\n"
        "load = train.load_data\n"
        "def note(options):\n"
        f"    with open({str(tmp_path / 'loads')!r}, 'a') as file: file.write('x')\n"
        "    return load(options)\n"
        "train.load_data = note\n"
        "run(train.main)\n"
    )
    arguments = ["--max_restarts=1", str(program)]
    ended = command("--data-dir=nowhere", ranks=2, program=arguments)
    assert ended.returncode == 1
    line = "nowhere/msr_paraphrase_train.txt: cannot be read: No such file or directory"
    assert ended.stderr.count(line) == 1, ended.stderr
    lines = [text for text in ended.stderr.splitlines() if text.strip("= ")]
    assert lines[-1] == f"  traceback : finetune: error: {line}"
    assert (tmp_path / "loads").read_text() == "xx"


def test_a_restart_goes_on_after_a_rank_was_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "from finetune import train, training_step\n"
        "from finetune.last_words import run\n"
        "evaluate = train.evaluate\n"
        "def die(*arguments):\n"
        "    first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "    if first and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return evaluate(*arguments)\n"
        "train.evaluate = die\n"
        "run(train.main)\n"
    )
    arguments = ["--steps=2", "--batch-size=4", f"--checkpoint={tmp_path / 'saved'}"]
    launch = ["--max_restarts=1", str(program)]
    ended = command(*arguments, "--resume=auto", ranks=2, program=launch)
    assert ended.returncode == 0, ended.stderr
    assert "resumed after step 2 from " in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("evaluation: ")


def test_as_many_checkpoints_are_kept_as_one_asks_for(tmp_path):
    options = replace(TINY, checkpoint=str(tmp_path), checkpoint_every=1, keep=3)
    run_training(lambda rank: train(options), 1)
    assert names(tmp_path) == [file(step) for step in (3, 4, 5)]


# Another number of ranks


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return index


EPOCHS = 9


def numbered(monkeypatch, ranks: int, rank: int) -> Batches:
    """A rank's batches of 5 numbers, without the other ranks."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    sampler = DistributedSampler(Numbers(), ranks, rank, drop_last=True)
    own = torch.Generator()
    loader = DataLoader(Numbers(), 5, sampler=sampler, drop_last=True, generator=own)
    return Batches(loader, Options(batch_size=5, epochs=EPOCHS))


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (2, 3), (3, 2), (4, 4), (1, 3)])
@pytest.mark.parametrize("steps", [0, 1, 3, 7, 10, 39])
def test_other_ranks_go_on_at_the_last_joined_batch_that_is_whole(monkeypatch, before, now, steps):
    old = numbered(monkeypatch, before, 0)
    per_epoch = 200 // (before * 5)
    for _ in range(4 * per_epoch + steps):
        next(old)
    saved = old.state_dict()
    joined = []
    for rank in range(now):
        batches = numbered(monkeypatch, now, rank)
        batches.load_state_dict(saved)
        left = batches.steps_left()
        joined.append([next(batches)[0].tolist() for _ in range(left)])
        assert batches.steps_left() == 0
    epoch, taken = divmod(4 * per_epoch + steps, per_epoch)
    done = taken * before * 5 // (now * 5) * now * 5
    expected = []
    for of_epoch in range(epoch, EPOCHS):
        whole = DistributedSampler(Numbers(), 1, 0)
        whole.set_epoch(of_epoch)
        order = list(whole)
        expected += order[done : len(order) // (now * 5) * now * 5]
        done = 0
    found = [
        by_rank[position][index]
        for by_rank in zip(*joined, strict=True)
        for index in range(5)
        for position in range(now)
    ]
    assert found == expected


def test_a_training_goes_on_with_fewer_ranks_and_then_with_more(tmp_path):
    few = write_pairs(tmp_path / "data", 40)
    options = replace(
        TINY,
        data_dir=str(few),
        epochs=2,
        steps=None,
        checkpoint=str(tmp_path / "saved"),
        resume="auto",
        elastic=True,
        lr=1e-4,
    )

    def steps(rank, number):
        return train(replace(options, steps=number))

    def refused(rank):
        return error(replace(options, elastic=False))

    assert run_training(steps, 2, 3)[0].first_step == 0  # 24 of 40 pairs
    assert (
        "saved on 2 ranks, now there are 1: only an elastic resume goes on"
        in (run_training(refused, 1)[0])
    )
    alone = run_training(steps, 1, 9)[0]  # 24 more: 8 are of the second epoch
    assert (alone.first_step, len(alone.losses)) == (3, 6)
    assert read_state(tmp_path / "saved" / file(9))[0]["shared"]["batches"]["epoch"] == 1
    both = run_training(steps, 2, None)[0]  # 32 pairs are left
    assert (both.first_step, len(both.losses)) == (9, 4)
    assert names(tmp_path / "saved") == [file(9), file(13)]


def test_a_lock_is_for_all_ranks_or_none(tmp_path):
    (tmp_path / "file").touch()

    def lock(rank):
        with pytest.raises(CheckpointError) as caught, checkpoint.locked(tmp_path / "file"):
            pass
        return str(caught.value)

    for found in run_training(lock, 2):
        assert found == f"cannot use {tmp_path / 'file'}: rank 0: File exists"
