"""The whole program: the same training however it is cut up, and what it writes."""

import fcntl
import gc
import itertools
import json
import logging
import os
import pty
import struct
import sys
import termios
import weakref
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch

from finetune import data, last_words
from finetune.data import Batches, build_loader, collate, encode, load_data
from finetune.model import load_model, train_tokenizer
from finetune.train import Result, evaluate, log_summary, train
from instruments.profiling import REGIONS
from instruments.trace import read_trace
from miniddp.launch import RanksFailed
from miniddp.process import set_seed

from .training_cases import SHORT, command, run_training, train_each, write_pairs

JOINED = 24
"""Pairs in each step of the runs that are compared, over all ranks."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone() -> Result:
    return train_each(1, replace(SHORT, batch_size=JOINED))[0][0]


CUT_UP = {
    "simple": {},
    "miniddp": {"ddp": "miniddp"},
    "torch": {"ddp": "torch"},
    "2 micro-batches": {"accumulation": 2},
    "3 micro-batches": {"accumulation": 3, "ddp": "miniddp"},
    "4 micro-batches": {"accumulation": 4, "ddp": "torch"},
    "idle clipping": {"clip": 1e6},
}


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[Result]]:
    half = replace(SHORT, batch_size=JOINED // 2)
    results = train_each(2, *(replace(half, **changes) for changes in CUT_UP.values()))
    return dict(zip(CUT_UP, zip(*results, strict=True), strict=True))


@pytest.mark.parametrize("case", CUT_UP)
def test_two_ranks_train_like_one_process_with_the_joined_batch(alone, on_two_ranks, case):
    first, second = on_two_ranks[case]
    assert first == second
    assert len(first.losses) == SHORT.steps
    assert first.losses == pytest.approx(alone.losses, abs=1e-4)
    assert first.evaluation_loss == pytest.approx(alone.evaluation_loss, abs=1e-4)
    assert first.accuracy == alone.accuracy


@pytest.mark.parametrize("case", CUT_UP)
def test_the_measures_of_a_result_belong_together(on_two_ranks, case):
    result = on_two_ranks[case][0]
    assert (result.world_size, result.first_step) == (2, 0)
    assert result.samples_per_second == pytest.approx(SHORT.steps * JOINED / result.seconds)
    assert 0 <= result.accuracy <= 1


def test_three_ranks_train_like_one_process(alone):
    results = train_each(3, replace(SHORT, batch_size=JOINED // 3))
    assert results[0] == results[1] == results[2]
    assert results[0][0].losses == pytest.approx(alone.losses, abs=1e-4)
    assert results[0][0].accuracy == alone.accuracy


def test_the_loss_falls_and_other_options_give_other_curves(alone, tmp_path):
    few = write_pairs(tmp_path, 24)
    long = replace(SHORT, data_dir=str(few), epochs=30, steps=None)
    again = replace(SHORT, batch_size=JOINED)
    changes = [{"seed": 1}, {"lr": 1e-4}, {"clip": 0.01}, {"warmup": 5}]
    ((falling, same, *others),) = train_each(
        1, long, again, *(replace(again, **change) for change in changes)
    )
    assert len(falling.losses) == 60
    assert sum(falling.losses[-5:]) / 5 < 0.5 * sum(falling.losses[:5]) / 5
    assert same.losses == alone.losses
    for other, change in zip(others, changes, strict=True):
        assert other.losses != pytest.approx(alone.losses, abs=1e-4), change


def test_steps_may_end_training_early_but_never_extend_it(tmp_path):
    few = replace(SHORT, data_dir=str(write_pairs(tmp_path, 30)), steps=None, epochs=2)
    ((whole, shorter, longer),) = train_each(1, few, replace(few, steps=3), replace(few, steps=99))
    assert [len(result.losses) for result in (whole, shorter, longer)] == [4, 3, 4]
    assert shorter.losses == whole.losses[:3]


def token_batches(rank: int, batch_size: int, accumulation: int) -> list[list[list[int]]]:
    """What this rank gets in the second epoch: for each step the tokens of its pairs."""
    options = replace(SHORT, batch_size=batch_size, accumulation=accumulation, epochs=2, steps=None)
    pairs, _, tokenizer, _ = load_data(options)
    batches = Batches(build_loader(pairs, tokenizer, options), options)
    steps = [next(batches) for _ in range(batches.steps_left())]
    assert batches.steps_left() == 0
    return [
        [
            ids[mask.bool()].tolist()
            for batch in step
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        for step in steps[len(steps) // 2 :]
    ]


def seed_of_workers(rank: int) -> int:
    return build_loader(range(8), None, SHORT).generator.initial_seed()


def test_loader_workers_of_each_rank_draw_other_numbers():
    assert len(set(run_training(seed_of_workers, 2))) == 2


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 3), (3, 1)])
def test_joined_batches_are_the_same_however_they_are_cut_up(world_size, accumulation):
    alone = run_training(token_batches, 1, 12, 1)[0]
    ranks = run_training(token_batches, world_size, 12 // world_size, accumulation)
    joined = [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert joined == [sorted(batch) for batch in alone]
    assert len(joined) == len(data.read_sample("train")) // 12


def test_evaluation_counts_every_pair_once_on_uneven_shards():
    def evaluate_untrained(rank):
        set_seed(0)
        _, pairs, tokenizer, _ = load_data(SHORT)
        return evaluate(load_model("tiny"), pairs, tokenizer, batch_size=4)

    measured = run_training(evaluate_untrained, 3)

    rows = data.read_sample("train")
    sentences = [row["sentence1"] for row in rows] + [row["sentence2"] for row in rows]
    tokenizer = train_tokenizer(sentences, 2048)
    set_seed(0)
    model = load_model("tiny").eval()
    pairs = encode(data.to_dataset(data.read_sample("test"), "test"), tokenizer, SHORT.max_length)
    assert len(pairs) % 3 != 0
    losses, hits = [], []
    for row in pairs:
        batch = collate([row], tokenizer)
        with torch.no_grad():
            output = model(**batch)
        losses.append(output.loss.item())
        hits.append(output.logits.argmax().item() == row["labels"])
    expected = (sum(losses) / len(losses), sum(hits) / len(hits))
    for found in measured:
        assert found == pytest.approx(expected, abs=1e-5)


def test_data_that_does_not_fill_one_joined_batch_is_refused_on_every_rank(tmp_path):
    few = write_pairs(tmp_path, 3)
    with pytest.raises(RanksFailed) as caught:
        train_each(4, replace(SHORT, data_dir=str(few), batch_size=1))
    assert set(caught.value.tracebacks) == {0, 1, 2, 3}
    for text in caught.value.tracebacks.values():
        assert "4 ranks x batch size 1 need 4 training pairs in each step, found 3" in text


def test_ranks_with_other_data_or_without_any_are_named_on_every_rank(tmp_path):
    write_pairs(tmp_path / "0", 40)
    write_pairs(tmp_path / "1", 41)

    def errors(rank):
        found = []
        for folder in (str(rank), "0" if rank == 0 else "nowhere"):
            with pytest.raises(data.DataError) as caught:
                train(replace(SHORT, data_dir=str(tmp_path / folder)))
            found.append(str(caught.value))
        return found

    other = "SHA-256 of the pairs' tokens is "
    missing = f"rank 1: {tmp_path}/nowhere/msr_paraphrase_train.txt: cannot be read: No such file"
    for found in run_training(errors, 2):
        assert found[0].startswith(other)
        assert " on rank 0, and " in found[0]
        assert found[1].startswith(missing)


def test_training_needs_a_process_group():
    with pytest.raises(RuntimeError, match="process group"):
        train(SHORT)


def test_evaluation_leaves_every_part_in_the_mode_that_it_was_in(monkeypatch, caplog):
    def modes_around(rank):
        _, pairs, tokenizer, _ = load_data(SHORT)
        model = load_model("tiny").train()
        model.model.layers[1].eval()
        before = {name: part.training for name, part in model.named_modules()}
        seen = set()
        model.model.layers[0].register_forward_hook(lambda part, *_: seen.add(part.training))
        evaluate(model, pairs, tokenizer, batch_size=16)
        after = {name: part.training for name, part in model.named_modules()}
        return before, after, seen

    ((before, after, seen),) = run_training(modes_around, 1)
    assert set(before.values()) == {True, False}
    assert after == before
    assert seen == {False}


def test_a_training_keeps_no_tensor_of_its_steps():
    """Twice as many steps leave as many tensors: losses are floats soon."""

    def tensors_at_the_end(rank, steps):
        from finetune import train as program
        from finetune import training_step

        torch.set_num_threads(1)
        counts = []

        def count_and_evaluate(*arguments):
            gc.collect()
            counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
            return evaluate(*arguments)

        def watched(*arguments, **options):
            loss = step(*arguments, **options)
            alive.add(loss)
            most.append(len(alive))
            return loss

        step, alive, most = training_step.train_step, weakref.WeakSet(), []
        program.evaluate, training_step.train_step = count_and_evaluate, watched
        long = replace(SHORT, steps=steps, epochs=50, batch_size=4, max_length=8)
        result = program.train(long)
        program.evaluate, training_step.train_step = evaluate, step
        assert len(result.losses) == steps
        return counts[0], max(most)

    (few, most), (many, most_of_many) = (
        run_training(tensors_at_the_end, 1, steps)[0] for steps in (25, 50)
    )
    assert few == many
    assert most == most_of_many == 20


@pytest.mark.parametrize("ddp", ["simple", "torch"])
def test_a_trace_has_all_regions_of_the_steps_that_are_profiled(tmp_path, ddp):
    options = replace(SHORT, ddp=ddp, batch_size=4, accumulation=2, steps=13, profile=str(tmp_path))
    train_each(2, options)
    (file,) = tmp_path.iterdir()
    names = [event.name for event in read_trace(file).events if event.category != "gpu"]
    per_step = {"data_movement": 2, "forward": 2, "backward": 2, "sync_grads": 1, "opt_step": 1}
    assert {name: names.count(name) / 5 for name in REGIONS} == per_step


def test_the_program_runs_without_torchrun_shows_progress_and_ends_with_a_summary(tmp_path):
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))  # lines, columns
    try:
        ended = command(
            *("--model=tiny", "--steps=2", "--batch-size=4", f"--profile={tmp_path}"),
            stderr=stderr,
        )
        os.close(stderr)
        shown = b""
        while part := _read(terminal):
            shown += part
    finally:
        os.close(terminal)
    lines = shown.decode().splitlines()
    assert ended.returncode == 0, lines
    loss, speed, evaluation = lines[-3:]
    assert loss.startswith("loss: ")
    assert speed.startswith("speed: 2 steps on 1 rank in ")
    assert speed.endswith(" samples per second")
    assert "--profile: fewer than 9 steps leave no trace" in lines
    assert evaluation.startswith("evaluation: loss ")
    bar = next(line for line in lines if "2/2 [" in line)
    assert "step/s, loss=0." in bar or "s/step, loss=0." in bar


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed and all is read
        return b""


def test_torchrun_logs_on_rank_0_only_and_goes_on_from_a_checkpoint(tmp_path):
    few = write_pairs(tmp_path / "data", 20)
    arguments = [f"--data-dir={few}", "--batch-size=4", "--accumulation=2", "--ddp=torch"]
    arguments += [f"--checkpoint={tmp_path / 'saved'}", "--resume=auto"]
    ended = command(*arguments, "--steps=1", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("training begins anew") == 1
    ended = command(*arguments, "--steps=2", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("resumed after step 1 from ") == 1
    assert ended.stderr.count("speed: 1 steps on 2 ranks in ") == 1
    assert ended.stderr.count("train data from ") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--data-dir={folder}"],
            "{folder}/msr_paraphrase_train.txt: cannot be read: No such file or directory",
        ),
        (["--lr=nan"], "--lr must be a positive number below 1e30, got nan"),
        (["--epoch=2"], "unrecognized arguments: --epoch=2"),
    ],
)
def test_an_error_of_the_job_is_shown_once_and_as_its_last_line(tmp_path, arguments, line):
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    expected = "finetune: error: " + line.format(folder=tmp_path)
    ended = command(*arguments, ranks=2)
    assert ended.returncode == 1  # torchrun's own, whatever that of the ranks
    assert ended.stderr.count(expected) == 1, ended.stderr
    lines = [text for text in ended.stderr.splitlines() if text.strip("= ")]
    assert lines[-1] == f"  traceback : {expected}"
    assert ended.stderr.count(f"exitcode  : {1 if 'data-dir' in arguments[0] else 2}") == 2
    assert 'finetune/train.py", line' not in ended.stderr, "a rank printed a traceback"
    ended = command(*arguments)
    assert ended.returncode == (1 if "data-dir" in arguments[0] else 2)
    assert ended.stderr.splitlines()[-1] == expected


OLD_TORCH = """
import runpy, torch
from torch.torch_version import TorchVersion
torch.__version__ = TorchVersion("2.5.1")
runpy.run_module("finetune", run_name="__main__")
"""


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_torch_that_is_too_old_is_one_line_with_what_to_do(tmp_path, ranks):
    (tmp_path / "old.py").write_text(OLD_TORCH)
    ended = command(ranks=ranks, program=[str(tmp_path / "old.py")])
    assert ended.returncode == 1
    (needed,) = [text for text in requires("miniddp") if text.startswith("torch>=")]
    line = (
        f"finetune: error: torch 2.5.1 is older than {needed[7:]}: pip install --upgrade '{needed}'"
    )
    lines = [text for text in ended.stderr.splitlines() if text.strip("= ")]
    assert lines[-1].removeprefix("  traceback : ") == line
    assert "finetune/" not in ended.stderr, "a rank printed a traceback"


def test_one_rank_takes_the_backend_that_it_is_told():
    program = (
        "import torch.distributed as dist\n"
        "from finetune import job\n"
        "job.start(timeout=60, backend='cpu:gloo')\n"
        "print(dist.get_backend_config(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    assert command(program=["-c", program]).stdout.strip() == "cpu:gloo"


def test_ranks_that_want_different_backends_are_told_in_one_line(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from finetune import last_words\n"
        "from finetune.train import main\n"
        "if os.environ['RANK'] == '1': sys.argv.append('--backend=cpu:gloo')\n"
        "last_words.run(main)\n"
    )
    ended = command("--backend=gloo", ranks=2, program=[str(program)])
    assert ended.returncode == 1
    last = [text for text in ended.stderr.splitlines() if text.strip("= ")][-1]
    assert last.startswith("  traceback : finetune: error: ")
    assert "rank 0 for gloo" in last
    assert "rank 1 for cpu:gloo" in last
    assert "finetune/" not in ended.stderr, "a rank printed a traceback"


def test_a_rank_that_fails_unexpectedly_does_not_wait_for_the_others(tmp_path):
    """One rank runs out of memory while another waits: its traceback is shown, and it ends."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time, finetune.train as program\n"
        "from finetune import training_step\n"
        "from finetune.last_words import run\n"
        "def step(*_, **__):\n"
        "    if os.environ['RANK'] == '1': raise MemoryError('no memory for this step')\n"
        "    time.sleep(600)\n"
        "training_step.train_step = step\n"
        "run(program.main)\n"
    )
    ended = command(ranks=2, program=[str(program)])
    assert ended.returncode == 1
    summary = ended.stderr[ended.stderr.index("Root Cause") :]
    assert "MemoryError: no memory for this step" in summary
    assert "rank      : 1" in summary


def test_torchrun_never_sees_half_an_error_file(tmp_path, monkeypatch):
    """It reads the file when the rank ends, perhaps by SIGKILL in the middle of a word."""
    file, seen = tmp_path / "error.json", []
    write = Path.write_text

    def in_two_parts(path, text):
        write(path, text[:5])
        seen.append(file.exists())
        return write(path, text)

    def fail():
        raise MemoryError("none left")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(Path, "write_text", in_two_parts)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        last_words.run(fail)
    assert seen == [False]
    assert json.loads(file.read_text())["message"]["message"] == "MemoryError: none left"
    assert [*tmp_path.iterdir()] == [file]


def test_summary_names_what_was_measured(caplog):
    caplog.set_level(logging.INFO)
    log_summary(Result([4.0] * 10 + [1.0] * 10, 5.0, 64.04, 0.5, 0.75, 2))
    assert caplog.messages == [
        "loss: 4.000 → 1.000 (means of the first and last 2 steps)",
        "speed: 20 steps on 2 ranks in 5.0 s, 64.0 samples per second",
        "evaluation: loss 0.500, accuracy 0.750",
    ]
