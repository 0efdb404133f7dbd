"""PyTorch's own tests of DistributedDataParallel, on two ranks, for torch's class and miniddp's.

`verdicts.py` lists them all. What `distributed_test.py` holds runs as it is where that is possible;
the rest is told anew in `scenarios.py`.
"""

from typing import Any

import pytest

from ...parity import row
from .. import ranks
from . import suite
from .suite import Case
from .verdicts import VERDICTS, Outcome

WORLD_SIZE = 2
SECTION = "torch's tests"
Task = str | Case
Raised = dict[Task, list[str]]


def cases(outcome: Outcome) -> list[Any]:
    return [
        pytest.param(verdict.scenario or name, verdict.sentence, marks=mark(file, name), id=name)
        for file, verdicts in VERDICTS.items()
        for name, verdict in verdicts.items()
        if verdict.outcome == outcome
    ]


def mark(file: str, name: str) -> pytest.MarkDecorator:
    verdict = VERDICTS[file][name]
    passes = "passes, told anew" if verdict.scenario else "passes, as it is"
    outcome = f"{verdict.outcome}: {verdict.reason}" if verdict.reason else passes
    return row(SECTION, says=f"`{name}`", torch=f"`{file}`", miniddp=outcome)


def with_class_of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("implementation", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def raised(
    implementation: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Raised:
    """What the chosen tests raise on each rank: all of them run in the same two processes."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    tasks = list(
        dict.fromkeys(
            call["task"]
            for call in calls
            if "task" in call and call["implementation"] == implementation
        )
    )
    folder = str(tmp_path_factory.mktemp(implementation))
    arguments = WORLD_SIZE, implementation, tasks, ranks.backend, folder
    found = ranks.run(suite.outcomes, WORLD_SIZE, *arguments, backend=None, timeout=150)
    return {task: [rank[number] for rank in found] for number, task in enumerate(tasks)}


@with_class_of("miniddp", "torch")
@pytest.mark.parametrize(("task", "sentence"), cases("passes"))
def test_passes(raised: Raised, task: Task, sentence: str) -> None:
    for message in raised[task]:
        assert not message


@with_class_of("miniddp")
@pytest.mark.parametrize(("task", "sentence"), cases("refused"))
def test_is_refused(raised: Raised, task: Task, sentence: str) -> None:
    """Every rank raises an error of miniddp's, and it names what is refused."""
    for message in raised[task]:
        *_, last = message.strip().splitlines() or [""]
        assert sentence in last
        assert "miniddp/" in message


@with_class_of("torch")
@pytest.mark.parametrize(
    "task", dict.fromkeys(case.values[0] for case in cases("refused") if callable(case.values[0]))
)
def test_torch_does_what_is_refused(raised: Raised, task: Task) -> None:
    """A scenario that miniddp refuses is one that torch's class passes."""
    for message in raised[task]:
        assert not message


def test_the_list_is_that_of_torch() -> None:
    """A new test of DistributedDataParallel in torch's file needs a verdict."""
    assert sorted(VERDICTS["distributed_test.py"]) == suite.tests_of_ddp()


def test_no_test_of_torch_compares_recorded_texts() -> None:
    """Else the class that stands in for expecttest's would not do."""
    assert "assertExpected" not in suite.FILE.read_text(encoding="utf-8")


for case in cases("not applicable"):
    for parity_row in case.marks:
        parity_row(test_the_list_is_that_of_torch)
