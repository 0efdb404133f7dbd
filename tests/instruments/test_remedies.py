"""The slow step and its remedies: what goes into a step, what a remedy may bring and when it
is kept."""

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from finetune.data import encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from instruments import remedies
from instruments.remedies import Remedy, State, Trial, avoidable, chance, needed, pays
from instruments.slow_step import Pairs, Settings, Training
from miniddp import set_seed

MAX_LENGTH = 64


class Padder:
    """Pads with zeros, as a tokenizer does."""

    def pad(self, rows: list[Any], return_tensors: str, padding: str, **options: int) -> Any:
        longest = max(len(row["input_ids"]) for row in rows)
        multiple = options.get("pad_to_multiple_of", 1)
        width = options.get("max_length", -(-longest // multiple) * multiple)
        ids = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
        return {"input_ids": torch.tensor(ids)}


def rows(count: int) -> list[dict[str, list[int]]]:
    """Of 1, 2, 3 … tokens."""
    return [{"input_ids": [length] * length} for length in range(1, count + 1)]


def lengths(chunks: list[list[dict[str, list[int]]]]) -> list[list[int]]:
    return [[len(row["input_ids"]) for row in chunk] for chunk in chunks]


def test_ranks_share_each_joined_batch() -> None:
    pairs = Pairs(rows(32), Padder(), world_size=2, micro_batches=4, max_length=40)
    for settings in (Settings(batch_size=4), Settings(batch_size=4, by_length=True)):
        first = lengths(pairs.of_rank(0, settings))
        second = lengths(pairs.of_rank(1, settings))
        assert [len(chunk) for chunk in (*first, *second)] == [4] * 8
        both = [length for chunk in (*first, *second) for length in chunk]
        assert sorted(both) == list(range(1, 33)), "every pair once"
        assert first == lengths(pairs.of_rank(0, settings)), "the same again"


def test_pairs_of_like_lengths_need_less_padding() -> None:
    pairs = Pairs(rows(32), Padder(), world_size=1, micro_batches=8, max_length=40)
    slow = Settings(batch_size=4)
    alike = replace(slow, by_length=True)
    for chunk in lengths(pairs.of_rank(0, alike)):
        assert max(chunk) - min(chunk) == 3
    assert {pairs.pad(rows(7), slow)["input_ids"].shape for _ in range(2)} == {(7, 40)}
    assert pairs.pad(rows(7), alike)["input_ids"].shape == (7, 8)
    assert pairs.pad(rows(9), alike)["input_ids"].shape == (9, 16)


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank; the test's threads are its own again afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, Pairs]:
    data = load_mrpc(None).select(range(16))
    sentences = data[:]["sentence1"] + data[:]["sentence2"]
    tokenizer = load_tokenizer(sentences, "tiny", pretrained=False)
    encoded = list(encode(data, tokenizer, MAX_LENGTH))
    set_seed(0)
    template = load_model("tiny", pretrained=False)
    return template, Pairs(encoded, tokenizer, 1, 4, MAX_LENGTH)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "change",
    [{"buckets": True}, {"attention": "sdpa"}, {"fused_optimizer": True},
     {"read_every_loss": False}],
)  # fmt: skip
def test_a_remedy_that_leaves_the_batches_leaves_the_losses(
    small: tuple[nn.Module, Pairs], change: dict[str, Any]
) -> None:
    template, pairs = small
    slow = Training(Settings(batch_size=2), template, pairs, 0)
    quick = Training(replace(slow.settings, **change), template, pairs, 0)
    assert len(slow.losses) == 4
    assert quick.losses == pytest.approx(slow.losses, abs=1e-4)
    assert (quick.tokens, quick.computed) == (slow.tokens, slow.computed)
    assert slow.computed == 4 * 2 * MAX_LENGTH > slow.tokens


@pytest.mark.usefixtures("alone")
def test_accumulation_updates_once_for_all_its_batches(small: tuple[nn.Module, Pairs]) -> None:
    template, pairs = small
    training = Training(Settings(batch_size=2, accumulation=4), template, pairs, 0)
    before = [parameter.clone() for parameter in training.model.parameters()]
    training.train(3)
    unchanged = zip(before, training.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in unchanged), "three of four batches: no update yet"
    training.train(4)
    assert not torch.equal(before[0], next(training.model.parameters()))


# What a remedy may bring, and whether it is kept


def state(exposed: float = 0.0, optimizer: float = 0.0, padding: float = 0.0) -> State:
    family = SimpleNamespace(share=optimizer)
    breakdown: Any = SimpleNamespace(families={"optimizer": family})
    tokens = round(1000 * (1 - padding))
    return State(Settings(), 1.0, tokens, 1000, [], breakdown, exposed)


def test_a_remedy_saves_at_most_what_it_aims_at() -> None:
    step = state(exposed=0.3, optimizer=0.2, padding=0.5)
    assert avoidable({"by_length": True}, step) == pytest.approx(0.5 * 0.5)
    assert avoidable({"buckets": True}, step) == 0.3
    assert avoidable({"fused_optimizer": True}, step) == 0.2
    assert avoidable({"accumulation": 4}, step) == pytest.approx(0.75 * 0.5)
    assert avoidable({"bf16": True}, step) is None


def test_a_remedy_pays_if_it_was_faster_in_eight_of_nine_rounds() -> None:
    assert pays([1.1, 1.2, 1.3, 1.1, 0.9, 1.2, 1.1, 1.3, 1.2])
    assert not pays([1.1, 1.2, 1.3, 1.1, 0.9, 1.2, 0.9, 1.3, 1.2])
    assert not Trial(Remedy("none", "", {}), state()).kept


def test_few_remedies_without_effect_are_kept() -> None:
    assert (needed(9), needed(20)) == (8, 16)
    assert chance(8, 9) == pytest.approx(10 / 512)
    drawn = random.Random(0)
    kept = sum(pays([drawn.lognormvariate(0, 0.1) for _ in range(9)]) for _ in range(10_000))
    assert kept / 10_000 == pytest.approx(chance(8, 9), abs=0.005)
    with pytest.raises(ValueError, match="5 rounds are too few"):
        needed(5)


def test_which_remedies_change_what_a_step_takes() -> None:
    changing = [remedy.name for remedy in remedies.remedies(16) if remedy.changes_losses]
    assert changing == ["batches of like lengths", "16 pairs in a batch", "accumulation of 4"]
    updates = [remedy.name for remedy in remedies.remedies(16) if remedy.changes_updates]
    assert updates == changing[1:]


class Scripted:
    """A training whose speed its settings decide: pairs a second."""

    speeds = {8: 1.0, 16: 2.0, 32: 0.5}  # noqa: RUF012

    def __init__(self, settings: Settings, *_: object) -> None:
        if settings.batch_size not in self.speeds:
            raise RuntimeError("no such\nbatch")
        self.settings = settings
        self.losses = [1.0, float(settings.batch_size)]
        self.tokens = self.computed = 100

    def pass_seconds(self) -> float:
        return self.tokens / self.speeds[self.settings.batch_size]


@pytest.mark.usefixtures("alone")
def test_what_pays_is_kept_and_the_next_remedy_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "Training", Scripted)
    monkeypatch.setattr(remedies, "peak", lambda settings: float(settings.batch_size))
    monkeypatch.setattr(
        remedies, "look_at", lambda training, _: replace(state(), settings=training.settings)
    )
    tried = [Remedy(f"{size}", "updates", {"batch_size": size}) for size in (64, 16, 32)]
    done = remedies.repair(0, nn.Identity(), None, tried, 6, Settings())
    failed, faster, slower = done.trials
    assert failed.failure == "RuntimeError: no such batch"
    assert (faster.ratios, faster.loss_difference, faster.kept) == ([2.0] * 6, 8.0, True)
    assert (slower.ratios, slower.kept) == ([0.25] * 6, False)
    assert slower.step.settings.batch_size == 16, "the step as repaired so far"
    assert done.before.settings.batch_size == 8
    assert done.after.settings.batch_size == 16
    assert done.faster_alike == [1.0] * 6, "nothing was repaired before the updates changed"
    assert done.faster == [2.0] * 6
    assert done.peaks == (8.0, 16.0)
