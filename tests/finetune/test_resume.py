"""A training that is interrupted and resumed is the same training, bit for bit."""

import contextlib
import functools
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune import data
from finetune.options import Options
from finetune.state_file import CheckpointError, read_state
from finetune.train import Result, TrainingError

from .training_cases import SHORT, run_training, train_each, write_pairs

STEPS_IN_EPOCH = 5
STOPS = [3, 5, 7, 10]
"""In the middle of an epoch, at its end, in the middle of the next one, at the end of training."""

FILE = "step-00000002.safetensors"
STATES = {"options", "model", "optimizer", "scheduler", "scaler", "batches"}
MEASURED = {"seconds", "samples_per_second"}


def two_epochs(folder: Path, world_size: int) -> Options:
    """Two epochs of five steps, and some pairs left over in each."""
    few = write_pairs(folder, STEPS_IN_EPOCH * world_size * 4 + 2)
    return replace(
        SHORT, data_dir=str(few), batch_size=4, accumulation=2, epochs=2, steps=None, warmup=8
    )


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> Options:
    return two_epochs(tmp_path_factory.mktemp("data"), world_size=2)


def train_with_dropout(options: Options) -> Result:
    """Trains a model in which every rank draws random numbers in every step."""
    from finetune import train

    build = train.load_model

    def load_model(*arguments):
        model = build(*arguments)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        return model

    torch.set_num_threads(1)
    train.load_model = load_model
    try:
        return train.train(options)
    finally:
        train.load_model = build


def interrupted(rank: int, options: Options, folder: str) -> list[Result]:
    straight = train_with_dropout(replace(options, checkpoint=f"{folder}/straight"))
    parts = replace(options, checkpoint=f"{folder}/parts", resume="auto")
    return [straight, *(train_with_dropout(replace(parts, steps=stop)) for stop in STOPS)]


class Augmented(torch.utils.data.Dataset):
    """Pairs of which each reading changes some tokens, at random."""

    def __init__(self, pairs) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index):
        row = self.pairs[index]
        tokens = list(row["input_ids"])
        tokens[random.randrange(len(tokens))] = int(torch.randint(3, 500, ()))
        tokens[np.random.randint(len(tokens))] = 5
        return {**row, "input_ids": tokens}


@contextlib.contextmanager
def augmentation(workers: int):
    """Trainings whose loaders read augmented pairs, with so many workers."""
    build, loader = data.build_loader, data.DataLoader

    def build_loader(pairs, tokenizer, options):
        return build(Augmented(pairs), tokenizer, options)

    context = "fork" if workers else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "build_loader", build_loader)
        chosen = {"num_workers": workers, "multiprocessing_context": context}
        patch.setattr(data, "DataLoader", functools.partial(loader, **chosen))
        yield


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_training_augments_as_the_straight_one_bit_for_bit(tmp_path, workers):
    options = two_epochs(tmp_path / "data", world_size=2)

    def train_in_parts(rank):
        plain = train_with_dropout(replace(options, steps=3))
        with augmentation(workers):
            return plain, *interrupted(rank, options, str(tmp_path))

    plain, straight, *parts = run_training(train_in_parts, 2)[0]
    assert plain.losses != straight.losses[:3], "the pairs are augmented"
    assert [part.first_step for part in parts] == [0, *STOPS[:-1]]
    assert [loss for part in parts for loss in part.losses] == straight.losses
    last = "step-00000010.safetensors"
    assert (tmp_path / "parts" / last).read_bytes() == (tmp_path / "straight" / last).read_bytes()


def outcome(result: Result) -> dict[str, object]:
    return {name: value for name, value in asdict(result).items() if name not in MEASURED}


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {"ddp": "simple"}),
        (2, {"ddp": "torch", "amp": "bf16"}),
        (3, {"ddp": "miniddp", "clip": 0.5}),
        (3, {"ddp": "torch"}),
    ],
)
def test_a_resumed_training_is_the_straight_one_bit_for_bit(tmp_path, world_size, changes):
    options = replace(two_epochs(tmp_path / "data", world_size), **changes)
    results = run_training(interrupted, world_size, options, str(tmp_path))
    straight, *parts = results[0]
    assert len(straight.losses) == 2 * STEPS_IN_EPOCH
    assert [part.first_step for part in parts] == [0, *STOPS[:-1]]
    assert [loss for part in parts for loss in part.losses] == straight.losses
    last = outcome(parts[-1]) | {"losses": straight.losses, "first_step": 0}
    assert last == outcome(straight)
    assert outcome(results[1][-1]) == outcome(parts[-1])
    saved = sorted((tmp_path / "parts").glob("[!.]*"))
    assert [path.name for path in saved] == [f"step-{step:08d}.safetensors" for step in (7, 10)]
    (at_once,) = (tmp_path / "straight").glob("[!.]*")
    assert saved[-1].read_bytes() == at_once.read_bytes()
    assert {*read_state(at_once)[0]["shared"]} == STATES


def test_random_numbers_belong_to_the_state_and_checkpoints_come_every_so_many_steps(
    tmp_path, options
):
    from_file = str(tmp_path / "saved" / "step-00000004.safetensors")
    often = replace(options, checkpoint=str(tmp_path / "saved"), checkpoint_every=2, steps=5)

    def run(rank):
        from finetune.train import train

        torch.set_num_threads(1)
        with_dropout = train_with_dropout(often)
        names = sorted(path.name for path in (tmp_path / "saved").glob("[!.]*"))
        without = train(replace(options, steps=5))
        resumed = train_with_dropout(replace(options, resume=from_file, steps=5))
        return with_dropout, names, without, resumed, torch.initial_seed()

    results = run_training(run, 2)
    assert results[0][-1] != results[1][-1], "the ranks drop out the same activations"
    with_dropout, names, without, resumed, _ = results[0]
    assert names == ["step-00000004.safetensors", "step-00000005.safetensors"]
    assert with_dropout.losses != without.losses
    assert resumed.losses == with_dropout.losses[4:]


def test_a_save_that_was_killed_before_it_removed_the_old_leaves_no_more_than_keep(
    tmp_path, options
):
    folder = tmp_path / "kept"
    every = replace(options, checkpoint=str(folder), checkpoint_every=1, steps=3, keep=3)
    train_each(2, every, replace(every, resume="auto", keep=2))
    assert [path.name[5:13] for path in sorted(folder.glob("[!.]*"))] == ["00000002", "00000003"]


def test_a_resume_at_the_last_step_evaluates_and_trains_nothing(options, saved):
    finished = replace(options, resume=str(saved / FILE), steps=2)
    straight = replace(options, steps=2)
    results = train_each(2, straight, finished)
    for once, again in results:
        assert (again.losses, again.first_step) == ([], 2)
        assert again.accuracy == once.accuracy
        assert again.evaluation_loss == once.evaluation_loss


def error_of(options: Options) -> str:
    from finetune.train import train

    with pytest.raises((CheckpointError, TrainingError)) as caught:
        train(options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, options) -> Path:
    """A folder with the checkpoint of step 2 on two ranks."""
    from finetune.train import train

    folder = tmp_path_factory.mktemp("saved")
    saving = replace(options, checkpoint=str(folder), steps=2)
    run_training(lambda rank: train(saving), 2)
    return folder


def test_what_cannot_be_resumed_is_named_on_every_rank_in_one_line(tmp_path, options, saved):
    file = saved / FILE
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    (tmp_path / "cut").write_bytes(file.read_bytes()[:5000])
    (tmp_path / "other").write_text("something else entirely")
    other_data = str(write_pairs(tmp_path / "data", 44))

    def resume(path, **changes):
        return replace(options, resume=str(path), **changes)

    cases = {
        "cannot read": resume(tmp_path / "nowhere"),
        "its SHA-256 is another": resume(tmp_path / "damaged"),
        "cut is damaged or no checkpoint": resume(tmp_path / "cut"),
        "other is damaged or no checkpoint": resume(tmp_path / "other"),
        "saved with --lr 0.001, not 0.01": resume(file, lr=0.01),
        "saved with --ddp simple, not torch": resume(file, ddp="torch"),
        "saved with SHA-256 of the pairs' tokens ": resume(file, data_dir=other_data),
        "saved with --seed 0, not 5": resume(file, seed=5),
        "2 steps are taken, of 1": resume(file, steps=1),
        "go on with --resume auto": replace(options, checkpoint=str(saved)),
    }

    def errors(rank):
        return [error_of(case) for case in cases.values()]

    first, second = run_training(errors, 2)
    assert first == second
    for expected, found in zip(cases, first, strict=True):
        assert expected in found


def test_a_checkpoint_of_other_data_of_the_same_length_is_refused(tmp_path, options, saved):
    shutil.copytree(options.data_dir, tmp_path / "data")
    file = tmp_path / "data" / "msr_paraphrase_train.txt"
    text = file.read_text("utf-8")
    file.write_text(text.replace("\n0\t", "\n1\t", 1), "utf-8")
    assert file.read_text("utf-8") != text
    changed = replace(options, data_dir=str(tmp_path / "data"), resume=str(saved / FILE))
    for found in run_training(lambda rank: error_of(changed), 2):
        assert "saved with SHA-256 of the pairs' tokens " in found


def test_a_checkpoint_of_another_number_of_ranks_is_refused(options, saved):
    resume = replace(options, resume=str(saved / FILE))
    for found in run_training(lambda rank: error_of(resume), 3):
        assert "saved on 2 ranks, now there are 3" in found


@pytest.mark.parametrize("name", ["checkpoint", "profile"])
def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_loaded(tmp_path, name):
    (tmp_path / "file").touch()
    options = replace(SHORT, data_dir="nowhere", **{name: str(tmp_path / "file" / "folder")})
    expected = f"--{name}: cannot write into {tmp_path / 'file' / 'folder'}: Not a directory"
    found = run_training(lambda rank: error_of(options), 2)
    assert list(found) == [expected] * 2
