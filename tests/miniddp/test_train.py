import itertools
import logging
import math
import os
import signal
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest
import torch

from miniddp import data, run_ranks
from miniddp.data import collate, encode
from miniddp.launch import RanksFailed
from miniddp.model import load_model, train_tokenizer
from miniddp.options import parse_options
from miniddp.process import set_seed
from miniddp.report import Result, log_summary
from miniddp.train import Options, build_data, build_loader, evaluate, train

OFFLINE = {"HF_HUB_OFFLINE": "1"}
SHORT = Options(model="tiny", steps=5, batch_size=12, lr=1e-3, max_length=48)


def train_on(world_size: int, options: Options) -> list[Result]:
    def train_on_one_thread(rank):
        torch.set_num_threads(1)  # two threads on a busy machine wait for each other
        return train(options)

    return run_ranks(train_on_one_thread, world_size, timeout=120, env=OFFLINE)


def write_pairs(folder: Path, count: int) -> Path:
    """The first pairs of the sample as the files that ``--data-dir`` wants."""
    folder.mkdir(exist_ok=True)
    text = "".join(data.SAMPLE.read_text("utf-8").splitlines(keepends=True)[: count + 1])
    for name in data.FILES.values():
        (folder / name).write_text(text, "utf-8")
    return folder


def command(*arguments: str, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the program, with torchrun where ``ranks`` is given; none of its processes is left."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks
        else []
    )
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "miniddp.train", *arguments],
        env={**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone() -> Result:
    return train_on(1, SHORT)[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_a_part_of_the_batch_train_like_one_process(alone, world_size):
    results = train_on(world_size, replace(SHORT, batch_size=SHORT.batch_size // world_size))
    assert results[1:] == results[:-1]
    assert len(results[0].losses) == SHORT.steps
    assert results[0].losses == pytest.approx(alone.losses, abs=1e-4)
    assert results[0].evaluation_loss == pytest.approx(alone.evaluation_loss, abs=1e-4)
    assert results[0].accuracy == alone.accuracy


def test_another_seed_or_batch_size_gives_another_curve(alone):
    for options in (replace(SHORT, seed=1), replace(SHORT, batch_size=6)):
        assert train_on(1, options)[0].losses != pytest.approx(alone.losses, abs=1e-3)


def test_the_loss_falls(tmp_path):
    few = write_pairs(tmp_path, 24)
    result = train_on(1, replace(SHORT, data_dir=str(few), epochs=30, steps=None))[0]
    assert len(result.losses) == 60
    assert sum(result.losses[-5:]) / 5 < 0.5 * sum(result.losses[:5]) / 5


def test_the_measures_of_a_result_belong_together():
    result = train_on(2, SHORT)[0]
    samples = SHORT.steps * SHORT.batch_size * result.world_size
    assert result.world_size == 2
    assert result.samples_per_second == pytest.approx(samples / result.seconds)
    assert 0 < result.sync_share < 1
    assert 0 <= result.accuracy <= 1


def test_steps_may_end_training_early_but_never_extend_it(tmp_path):
    few = write_pairs(tmp_path, 30)
    options = replace(SHORT, data_dir=str(few), steps=None, epochs=2)
    assert len(train_on(1, options)[0].losses) == 4
    assert len(train_on(1, replace(options, steps=3))[0].losses) == 3
    assert len(train_on(1, replace(options, steps=99))[0].losses) == 4


def token_batches(rank: int, batch_size: int) -> list[list[list[int]]]:
    """What this rank gets in the second epoch: for each batch the tokens of its pairs."""
    options = replace(SHORT, batch_size=batch_size)
    train_data, _, tokenizer = build_data(options)
    loader = build_loader(train_data, tokenizer, options)
    loader.sampler.set_epoch(1)
    return [
        [ids[mask.bool()].tolist() for ids, mask in zip(*batch_of(batch), strict=True)]
        for batch in loader
    ]


def batch_of(batch):
    return batch["input_ids"], batch["attention_mask"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_joined_batches_are_the_same_for_any_number_of_ranks(world_size):
    alone = run_ranks(token_batches, 1, 12, timeout=120, env=OFFLINE)[0]
    ranks = run_ranks(token_batches, world_size, 12 // world_size, timeout=120, env=OFFLINE)
    joined = [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert joined == [sorted(batch) for batch in alone]
    assert len(joined) == len(data.read_sample("train")) // 12


def test_evaluation_counts_every_pair_once_on_uneven_shards():
    def evaluate_untrained(rank):
        set_seed(0)
        _, test_data, tokenizer = build_data(SHORT)
        return evaluate(load_model("tiny").eval(), test_data, tokenizer, batch_size=4)

    measured = run_ranks(evaluate_untrained, 3, timeout=120, env=OFFLINE)

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
        train_on(4, replace(SHORT, data_dir=str(few), batch_size=1))
    assert set(caught.value.tracebacks) == {0, 1, 2, 3}
    for text in caught.value.tracebacks.values():
        assert "world size 4 x batch size 1 needs 4 training pairs in each step, found 3" in text


def test_ranks_that_load_other_data_are_named_on_every_rank(tmp_path):
    write_pairs(tmp_path / "0", 40)
    write_pairs(tmp_path / "1", 41)

    def train_with_own_data(rank):
        train(replace(SHORT, data_dir=str(tmp_path / str(rank))))

    with pytest.raises(RanksFailed) as caught:
        run_ranks(train_with_own_data, 2, timeout=120, env=OFFLINE)
    assert set(caught.value.tracebacks) == {0, 1}
    for text in caught.value.tracebacks.values():
        assert "rank 1 loaded other pairs or tokens than rank 0" in text


def test_training_needs_a_process_group():
    with pytest.raises(RuntimeError, match="process group"):
        train(SHORT)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", "huge", "model must be one of tiny, 5m, 25m, 135m, 360m, got 'huge'"),
        ("epochs", 0, "epochs must be at least 1, got 0"),
        ("steps", 0, "steps must be at least 1, got 0"),
        ("batch_size", -1, "batch_size must be at least 1, got -1"),
        ("max_length", 0, "max_length must be at least 1, got 0"),
        ("lr", math.nan, "lr must be a positive number, got nan"),
        ("lr", math.inf, "lr must be a positive number, got inf"),
        ("seed", -1, "seed must not be negative, got -1"),
    ],
)
def test_bad_values_are_refused_by_the_dataclass_and_in_one_line_by_the_program(
    capsys, name, value, expected
):
    with pytest.raises(ValueError, match=expected):
        Options(**{name: value})
    flag = "--" + name.replace("_", "-")
    with pytest.raises(SystemExit) as ended:
        parse_options(Options, "miniddp.train", "", [f"{flag}={value}"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"miniddp.train: error: {expected}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--epoch", "2"], "unrecognized arguments: --epoch 2"),
        (["--epochs", "two"], "argument --epochs: invalid int value: 'two'"),
        (["--data-dir"], "argument --data-dir: expected one argument"),
    ],
)
def test_unknown_flags_and_bad_types_end_in_one_line(capsys, arguments, expected):
    with pytest.raises(SystemExit) as ended:
        parse_options(Options, "miniddp.train", "", arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"miniddp.train: error: {expected}\n"


def test_every_option_has_a_flag_and_options_cannot_be_changed():
    chosen = Options("here", "5m", False, 2, 3, 4, 0.5, 6, 7)
    assert all(getattr(chosen, name) != value for name, value in asdict(Options()).items())
    arguments = ["--data-dir=here", "--model=5m", "--no-pretrained", "--epochs=2", "--steps=3"]
    arguments += ["--batch-size=4", "--lr=0.5", "--max-length=6", "--seed=7"]
    assert parse_options(Options, "miniddp.train", "", arguments) == chosen
    assert parse_options(Options, "miniddp.train", "", []) == Options()
    with pytest.raises(FrozenInstanceError):
        chosen.lr = 1.0


def test_the_program_runs_without_torchrun_and_ends_with_a_summary():
    ended = command("--model=tiny", "--steps=2", "--batch-size=4")
    assert ended.returncode == 0, ended.stderr
    loss, speed, evaluation = ended.stderr.splitlines()[-3:]
    assert loss.startswith("loss: ")
    assert speed.startswith("speed: 2 steps on 1 rank in ")
    assert speed.endswith("of the step time in synchronisation")
    assert evaluation.startswith("evaluation: loss ")


def test_torchrun_logs_on_rank_0_only(tmp_path):
    few = write_pairs(tmp_path, 20)
    ended = command(f"--data-dir={few}", "--steps=2", "--batch-size=4", ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("speed: 2 steps on 2 ranks in ") == 1
    assert ended.stderr.count("train data from ") == 1


def test_a_missing_folder_ends_every_rank_in_one_line(tmp_path):
    ended = command(f"--data-dir={tmp_path}", ranks=2)
    assert ended.returncode != 0
    lines = [line for line in ended.stderr.splitlines() if line.startswith("miniddp.train: error")]
    assert 1 <= len(lines) <= 2, ended.stderr
    assert set(lines) == {
        f"miniddp.train: error: {tmp_path}: not found in this folder; "
        "looked for msr_paraphrase_train.txt and msr_paraphrase_test.txt"
    }
    assert "miniddp/train.py" not in ended.stderr, "a rank printed a traceback"


def test_summary_names_what_was_measured(caplog):
    caplog.set_level(logging.INFO)
    log_summary(Result([4.0] * 10 + [1.0] * 10, 5.0, 64.04, 0.256, 0.5, 0.75, 2))
    assert caplog.messages == [
        "loss: 4.000 → 1.000 (means of the first and last 2 steps)",
        "speed: 20 steps on 2 ranks in 5.0 s, 64.0 samples per second, "
        "25.6 % of the step time in synchronisation",
        "evaluation: loss 0.500, accuracy 0.750",
    ]
