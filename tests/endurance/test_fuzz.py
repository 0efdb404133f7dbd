"""Some of the programs of `make fuzz`; and what the fuzzer would say of classes with bugs."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from .fuzz.campaign import Campaign
from .fuzz.grammar import BUFFERS, draw, features
from .fuzz.judge import judge
from .fuzz.loop import KINDS
from .fuzz.ranks import Found, Outcome, Ranks, portable
from .fuzz.reference import reference
from .fuzz.shrink import shrink, stand_alone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forks")
PLAIN = {
    "seed": 1,
    "ranks": 2,
    "blocks": [{"kind": "linear"}, {"kind": "conv"}],
    "steps": [{}, {}],
    "start": "different",
}


@pytest.mark.timeout(900)  # a minute where nothing else runs
def test_programs_of_others_get_torchs_gradients_or_a_refusal() -> None:
    """The same programs each time: `make fuzz` draws new ones."""
    first = 7_000_000
    campaign = Campaign(seconds=30, shrinks=False)
    try:
        campaign.run(range(first, first + 60), until=monotonic() + 300)
    finally:
        campaign.stop()
    assert not campaign.failures, campaign.failures
    assert campaign.verdicts["same"] > 10, campaign.verdicts


# Bugs that are planted in the class of the ranks


def without_division() -> None:
    from miniddp.ddp.reducer import Reducer

    fill = Reducer.fill

    def broken(self: Any, bucket: Any) -> None:
        fill(self, bucket)
        bucket.buffer().mul_(self.world_size)

    Reducer.fill = broken  # type: ignore[method-assign]


def without_broadcast() -> None:
    from miniddp import replicate

    replicate.broadcast_module = lambda *_, **__: None  # type: ignore[assignment]


def without_layout_check() -> None:
    from miniddp.ddp import checks

    checks.check_alike = lambda *_, **__: None  # type: ignore[assignment]


def hooks_before_those_of_the_user() -> None:
    from functools import partial

    from miniddp.ddp.reducer import Reducer

    def add_hooks(self: Any) -> None:
        for i, parameter in enumerate(self.parameters):
            hook = partial(lambda i, _: self.mark_ready(i), i)
            parameter.register_post_accumulate_grad_hook(hook)

    Reducer.add_hooks = add_hooks  # type: ignore[method-assign]


def a_rank_that_dies() -> None:
    from miniddp.ddp.reducer import Reducer

    def die(self: Any, bucket: Any) -> None:
        raise SystemExit

    Reducer.fill = die  # type: ignore[method-assign]


def an_error_without_a_sentence() -> None:
    from miniddp.ddp.reducer import Reducer

    def fail(self: Any, bucket: Any) -> None:
        raise KeyError(bucket.index())

    Reducer.fill = fail  # type: ignore[method-assign]


LAYOUT = {"layout": {"how": "channels last", "ranks": "one", "when": "before"}}
BUGS: list[tuple[Callable[[], None], dict[str, Any], str]] = [
    (without_division, {}, "wrong"),
    (without_broadcast, {}, "wrong"),
    (without_layout_check, {"blocks": [{"kind": "conv", **LAYOUT}]}, "wrong"),
    (
        hooks_before_those_of_the_user,
        {"hook": {"kind": "scale", "when": "after", "on": "all"}},
        "wrong",
    ),
    (a_rank_that_dies, {}, "hangs"),
    (an_error_without_a_sentence, {}, "error"),
]


@pytest.mark.parametrize(("spoil", "feature", "word"), BUGS, ids=[b[0].__name__ for b in BUGS])
def test_a_planted_bug_is_noticed(
    spoil: Callable[[], None], feature: dict[str, Any], word: str
) -> None:
    spec = {**PLAIN, **feature}
    sound = Ranks(2, seconds=30)
    broken = Ranks(2, seconds=30, spoil=spoil)
    try:
        assert not judge(spec, sound.run(spec)).fails
        verdict = judge(spec, broken.run(spec))
    finally:
        sound.stop()
        broken.stop()
    assert verdict.word == word, verdict


# The judge, on traces that are made


@pytest.fixture(scope="module")
def right() -> list[Outcome]:
    return [Outcome(trace=portable(trace)) for trace in reference(PLAIN)]


def spoilt(outcomes: list[Outcome], rank: int, amount: float) -> list[Outcome]:
    """With one number of a gradient changed."""
    spec = [list(o.trace or []) for o in outcomes]
    place = next(i for i, (label, _) in enumerate(spec[rank]) if label == "0 mean")
    label, found = spec[rank][place]
    dtype, shape, data = found["heads.0.bias"]
    value = torch.frombuffer(bytearray(data), dtype=dtype).clone()
    value[0] += amount
    changed = {**found, "heads.0.bias": (dtype, shape, value.numpy().tobytes())}
    spec[rank][place] = (label, changed)
    return [Outcome(trace=trace) for trace in spec]


def refusing(error: str, kind: str = "RuntimeError", raised_in: str = "miniddp") -> list[Outcome]:
    return [Outcome(error=error, kind=kind, raised_in=raised_in)] * 2


@pytest.fixture
def verdict(right: list[Outcome]) -> Callable[[Any, Any], str]:
    return lambda ours, theirs: judge(PLAIN, Found(theirs, ours, right)).word


def test_the_judge(right: list[Outcome], verdict: Callable[[Any, Any], str]) -> None:
    a_bit = spoilt(spoilt(right, 0, 1e-6), 1, 1e-6)
    refusal = refusing("gradient of 'a' is sparse")
    assert verdict(right, right) == "same"
    assert verdict(right, a_bit) == "other bits"
    assert verdict(spoilt(right, 0, 1e-6), right) == "ranks disagree"
    assert verdict(spoilt(right, 1, 0.1), right) == "wrong"
    assert verdict(spoilt(right, 1, 0.1), spoilt(right, 1, 0.1)) == "wrong"
    assert verdict(right, spoilt(right, 1, 0.1)) == "better"
    assert verdict(right, refusal) == "better"
    assert verdict(refusal, spoilt(right, 1, 0.1)) == "better"
    assert verdict(refusal, right) == "refused"
    assert verdict(refusal, refusal) == "both refuse"
    assert verdict([refusal[0], refusing("Connection closed")[0]], refusal) == "error"
    assert verdict([refusal[0], right[1]], refusal) == "error"
    assert verdict(refusing("'x'", "KeyError"), refusal) == "error"
    assert verdict(refusing("two\nlines"), refusal) == "error"
    assert verdict(refusing("of autograd", raised_in="torch"), refusal) == "error"
    assert verdict([Outcome(hangs=True)] * 2, refusal) == "hangs"


# The shrinker


def test_what_is_not_needed_is_dropped() -> None:
    needed = {"hook": {"kind": "scale", "when": "after", "on": "all"}}
    spec = {**draw(5), **needed, "ranks": 3, "views": True}
    spec["blocks"] = [{"kind": "linear"}, {"kind": "conv", "twice": True, **LAYOUT}]
    spec["steps"] = [{"micro": 2}, {"kind": "retained", "zero": "never"}]

    def fails(candidate: dict[str, Any]) -> bool:
        return "hook" in candidate and "steps kind: retained" in set(features(candidate))

    assert shrink(spec, fails) == {
        "seed": 5,
        "ranks": 2,
        "blocks": [{"kind": "linear"}],
        "steps": [{"kind": "retained"}],
        **needed,
    }


def test_a_program_that_is_written_down_runs(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    file = tmp_path / "found_1.py"
    file.write_text(stand_alone(PLAIN, "seed 1"))
    monkeypatch.setattr(sys, "argv", [str(file), "miniddp"])
    runpy.run_path(str(file), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 runs to its end",
        "rank 1 runs to its end",
    ]


def test_a_seed_is_a_program() -> None:
    assert draw(3) == draw(3)
    reached = {feature for seed in range(3000) for feature in features(draw(seed))}
    words = {f"blocks buffer: {kind}" for kind in BUFFERS} | {
        f"steps kind: {kind}" for kind in KINDS
    }
    assert words - {"steps kind: plain"} <= reached
