"""`miniddp.check`: silent on right programs, and right about the wrong ones."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miniddp.check import __main__ as command
from miniddp.check import order
from miniddp.check.call_probes import MOST_FILES, CallProbes
from miniddp.check.exchange import UNFINISHED, Exchange
from miniddp.check.finding import TABLE, Run
from miniddp.check.recorder import Recorder
from miniddp.check.report import extent
from miniddp.check.samples import Rows
from miniddp.check.trained import Trained
from miniddp.launch import RanksFailed, run_ranks

from .watched import RIGHT, findings, fork_workers, written
from .wrong import WRONG

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_first(name: str, tmp_path: Path) -> None:
    found = findings(written(tmp_path, WRONG[name].text), may_fail=True)
    assert [finding["name"] for finding in found][:1] == [WRONG[name].finding]


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.stem)
def test_nothing_is_found_in_a_right_program(program: Path) -> None:
    assert findings(program) == []


CLINIC = {
    "branch.evaluate_on_rank_0": "other calls",
    "uneven.train_unevenly": "other calls",
    "stop.stop_alone": "other calls",
    "around.call_the_module": "around the wrapper",
    "unfreeze.unfreeze_after_wrapping": "not in the mean",
    "norm.keep_the_statistics_of_rank_0": "statistics of one rank",
    "nan.step_with_whatever_comes": "not finite",
}
"""Of chapter 14; the others fail by themselves, have no step, or are a matter of time."""


@pytest.mark.parametrize("name", CLINIC)
def test_the_clinics_cases_are_named(name: str, tmp_path: Path) -> None:
    module, _, function = name.partition(".")
    text = f"""
import sys

sys.path.insert(0, {str(ROOT / "runs")!r})
from clinic import {module}

{module}.{function}(rank)
"""
    found = findings(written(tmp_path, text), may_fail=True)
    assert [finding["name"] for finding in found][:1] == [CLINIC[name]]


def test_there_are_enough_programs() -> None:
    assert len(WRONG) >= 60
    assert len(RIGHT) >= 20


def test_the_pages_that_are_named_exist() -> None:
    for finding in TABLE.values():
        page, anchor = re.fullmatch(r"(\w+/[\w-]+)\.html#([\w-]+)", finding["page"]).groups()
        assert f"{{#{anchor}}}" in (ROOT / f"{page}.qmd").read_text(encoding="utf-8")


TRAINING = """
torch.manual_seed(rank)
ddp = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(ddp.parameters())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = (ddp(x) - y).square().mean()
        loss.backward()
        clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        print(loss.item().hex())
print([p.sum().item().hex() for p in ddp.parameters()], torch.rand(1).item().hex())
"""


def run_as_it_is(rank: int, script: str) -> None:
    fork_workers()
    exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"})


def run_command(rank: int, *arguments: str) -> int:
    fork_workers()
    sys.argv = ["miniddp.check", *arguments]
    try:
        return command.main()
    except SystemExit as end:
        return int(end.code or 0)


def in_folder(rank: int, folder: str, script: str) -> int:
    os.chdir(folder)
    return run_command(rank, script)


def test_a_watched_script_gives_the_same_bits(tmp_path: Path) -> None:
    script = str(written(tmp_path, TRAINING))
    alone = run_ranks(run_as_it_is, 2, script, backend=None).outputs
    results = run_ranks(run_command, 2, script, backend=None)
    assert list(results) == [0, 0]
    for before, watched in zip(alone, results.outputs, strict=True):
        lines = watched.splitlines()
        assert [line for line in lines if "miniddp.check" not in line] == before.splitlines()
    assert "miniddp.check: 0 found in 12 steps of 2 ranks" in results.outputs[0]


@pytest.mark.parametrize(
    ("text", "ranks", "code"),
    [
        ("import torch\nprint(torch.ones(1))", 1, command.NO_GROUP),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')", 1, command.ONE_RANK),
        ("raise SystemExit(3)", 1, 3),
        ("import sys\nsys.exit()", 1, command.NO_GROUP),
    ],
    ids=["no group", "one rank", "a code of its own", "an early end"],
)
def test_exit_codes(text: str, ranks: int, code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text, encoding="utf-8")
    assert list(run_ranks(run_command, ranks, str(script), backend=None)) == [code]


@pytest.mark.parametrize("name", ["missing.py", "folder", "notebook.ipynb"])
def test_what_is_no_script_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notebook.ipynb").write_text("{}", encoding="utf-8")
    results = run_ranks(run_command, 1, str(tmp_path / name), backend=None)
    assert list(results) == [command.NO_SCRIPT]
    assert len(results.outputs[0].splitlines()) == 1
    assert f"{name} " in results.outputs[0]


@pytest.mark.parametrize("name", ["missing_module", "missing.train"])
def test_what_is_no_module_is_said(name: str) -> None:
    results = run_ranks(run_command, 1, "-m", name, backend=None)
    assert list(results) == [command.NO_SCRIPT]
    assert len(results.outputs[0].splitlines()) == 1
    assert f"{name} " in results.outputs[0]


@pytest.mark.parametrize("count", ["0", "-3"])
@pytest.mark.parametrize("option", ["--steps", "--epochs"])
def test_nothing_is_not_watched(option: str, count: str) -> None:
    results = run_ranks(run_command, 1, option, count, "train.py", backend=None)
    assert list(results) == [2]
    assert "there is nothing to watch" in results.outputs[0]


def test_what_is_found_is_told_before_os_exit(tmp_path: Path) -> None:
    text = f"{WRONG['never wrapped'].text}\nimport os\n\nos._exit(3)\n"
    with pytest.raises(RanksFailed) as failure:
        run_ranks(run_command, 2, str(written(tmp_path, text)), backend=None)
    assert "miniddp.check: not wrapped" in "".join(failure.value.outputs)


BEGINS_LATE = """
import os
import time

from miniddp.check.exchange import Exchange

begin = Exchange.__init__


def begin_late(*arguments):
    time.sleep(float(os.environ["RANK"] == LATE))
    begin(*arguments)


Exchange.__init__ = begin_late
"""


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_begins_late_is_waited_for(late: int, code: int, tmp_path: Path) -> None:
    script = written(tmp_path, f"{WRONG['never wrapped'].text}\nos._exit({code})\n")
    begins_late = BEGINS_LATE.replace("LATE", f'"{late}"')
    script.write_text(begins_late + script.read_text(encoding="utf-8"), encoding="utf-8")
    assert "not wrapped" in [finding["name"] for finding in findings(script, may_fail=True)]


LEAVES = """
model = make_model()
for number, x in enumerate(mine(6)):
    if number == 3 and rank == LEAVER:
        break
    time.sleep(0.2)
    model(x).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
dist.destroy_process_group()
time.sleep(rank)
"""


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_its_group_before_it_ends_is_named(leaver: int, tmp_path: Path) -> None:
    script = str(written(tmp_path, LEAVES.replace("LEAVER", str(leaver))))
    with pytest.raises(RanksFailed) as failure:
        run_ranks(run_command, 2, script, backend=None)
    assert f"a rank has left: rank {leaver} has ended" in "".join(failure.value.outputs)


WITHOUT_A_FOLDER = """
import os

here = os.getcwd()
gone = os.path.join(here, "gone")
os.mkdir(gone)
os.chdir(gone)
os.rmdir(gone)
with open(os.path.join(here, "written"), "w") as file:
    file.write("whole")
"""


def test_a_file_is_written_where_the_watcher_cannot_tell_who_writes_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_A_FOLDER, encoding="utf-8")
    results = run_ranks(in_folder, 1, str(tmp_path), str(script), backend=None)
    assert list(results) == [command.NO_GROUP], results.outputs
    assert (tmp_path / "written").read_text() == "whole"


def test_what_is_noted_after_the_watch_has_a_bound(tmp_path: Path) -> None:
    recorder = Recorder(steps=1, epochs=None)
    probes = CallProbes(recorder, Trained())
    recorder.end_step()
    for step in range(2 * MOST_FILES):
        probes.audit("open", (str(tmp_path / "log.json"), "w"))
        probes.audit("open", (str(tmp_path / f"{step}.png"), "w"))
    assert [Path(event["path"]).name for event in recorder.events[:2]] == ["log.json", "0.png"]
    assert len(recorder.events) == MOST_FILES


EACH_STEP = """
ddp = DDP(make_model())
optimizer = sgd(ddp)
for number in range(300):
    generator = torch.Generator().manual_seed(2 * number + rank)
    x, _ = next(iter(DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)))
    step(ddp, optimizer, x)
import gc

recorder = next(o for o in gc.get_objects() if type(o).__name__ == "Recorder")
print("noted", len(recorder.events))
"""


def test_a_loader_made_anew_in_each_step_is_noted_no_more_after_the_watch(tmp_path: Path) -> None:
    script = str(written(tmp_path, EACH_STEP))
    results = run_ranks(run_command, 2, "--steps", "4", script, backend=None)
    noted = int(re.search(r"noted (\d+)", results.outputs[0]).group(1))
    assert noted < 100


def test_an_exception_passes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise KeyError('of the script')", encoding="utf-8")
    with pytest.raises(RanksFailed, match="KeyError: 'of the script'"):
        run_ranks(run_command, 1, str(script), backend=None)


def test_strict_exits_with_1_and_json_is_a_line_for_each(tmp_path: Path) -> None:
    script = str(written(tmp_path, WRONG["never wrapped"].text))
    results = run_ranks(run_command, 2, "--strict", "--json", script, backend=None)
    assert 1 in list(results)
    lines = [line for line in results.outputs[0].splitlines() if line.startswith("{")]
    finding: dict[str, Any] = json.loads(lines[0])
    line = int(finding["line"].rpartition(":")[2])
    assert "optimizer.step()" in Path(script).read_text().splitlines()[line - 1]
    assert finding["step"] == 0
    assert finding["ranks"] == [0, 1]


def test_a_module_gets_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "as_module.py").write_text("import sys\nprint(sys.argv[1:], __name__)")
    output = run_ranks(run_module, 1, str(tmp_path), backend=None).outputs[0]
    assert "['--steps', '3'] __main__" in output


def run_module(rank: int, folder: str) -> int:
    sys.path.insert(0, folder)
    return run_command(rank, "-m", "as_module", "--steps", "3")


def test_after_its_steps_nothing_is_noted(tmp_path: Path) -> None:
    wrong_in_the_end = WRONG["called past its wrapper"].text.replace(
        "step(ddp.module, optimizer, x)", "step(ddp, optimizer, x)"
    )
    text = f"{wrong_in_the_end}\nstep(ddp.module, optimizer, x)\n"
    script = str(written(tmp_path, text))
    results = run_ranks(run_command, 2, "--steps", "4", script, backend=None)
    assert "0 found in 4 steps" in results.outputs[0]
    assert "not averaged" not in "".join(results.outputs)


UNEQUAL = """
ddp = DDP(make_model())
optimizer = sgd(ddp)
shard = torch.randn(40 - 4 * rank, 4) + rank
for number, x in enumerate(DataLoader(shard)):
    step(ddp, optimizer, x)
    if number == 32:
        time.sleep(2)
        # the end
"""


def test_unequal_batches_are_told_before_they_hang(tmp_path: Path) -> None:
    found = findings(written(tmp_path, UNEQUAL), may_fail=True)
    assert [(f["name"], f["sure"]) for f in found][:1] == [("unequal batches", "likely")]


def test_unequal_batches_are_right_if_all_ranks_leave_the_loop(tmp_path: Path) -> None:
    text = UNEQUAL.replace("# the end", "break")
    assert findings(written(tmp_path, text)) == []


EPOCHS = """
ddp = DDP(make_model())
optimizer = sgd(ddp)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        step(ddp, optimizer, x)
    with torch.no_grad():
        for x, y in loader:
            ddp(x)
"""


def test_after_its_epochs_nothing_is_noted(tmp_path: Path) -> None:
    script = str(written(tmp_path, EPOCHS))
    results = run_ranks(run_command, 2, "--epochs", "2", script, backend=None)
    assert "0 found in 12 steps of 2 ranks" in results.outputs[0]


def test_what_is_found_is_told_before_the_script_ends(tmp_path: Path) -> None:
    text = (
        WRONG["called past its wrapper"].text
        + """
for _ in range(200):
    time.sleep(0.05)
    dist.barrier()
print("the script goes on")
"""
    )
    script = str(written(tmp_path, text))
    output = run_ranks(run_command, 2, "--steps", "4", script, backend=None).outputs[0]
    assert output.index("around the wrapper") < output.index("the script goes on")


class ReadWhileResolved(Rows):
    def __init__(self, epoch: dict[str, Any]) -> None:
        self.epoch = epoch
        self.batches = 0

    def resolve(self) -> list[int]:
        self.batches += 1
        self.epoch["read"] += 1
        return []


def test_what_an_epoch_counts_is_not_undone() -> None:
    recorder = Recorder(steps=None, epochs=None)
    epoch = recorder.note("epoch")
    epoch["rows"] = rows = ReadWhileResolved(epoch)
    epoch["read"] = 0
    for _ in range(UNFINISHED):
        recorder.note("batch")
    Exchange.resolve(SimpleNamespace(recorder=recorder, resolved=0))
    assert epoch["read"] == rows.batches


def test_a_rank_that_waits_nowhere_is_not_said_to_wait() -> None:
    place = {"operation": "barrier", "group": "", "shape": None}
    places = [place, {}, {}]
    stuck = [{"is_done": False, "place": place, "stack": []} for place in places]
    stuck[2]["is_done"] = True
    finding = order.hang(Run([[], [], []], stuck))
    assert finding.text == "rank 2 has ended; rank 0 waits in barrier ()"


def test_a_rank_that_was_killed_has_left_no_notes() -> None:
    events = [[{"kind": "save"}], []]
    assert extent(Run(events, stuck=[])) == "0 steps of 2 ranks; no notes of rank 1"


def test_that_nothing_has_stepped_is_said() -> None:
    events = [[{"kind": "save"}], [{"kind": "save"}]]
    said = "0 steps of 2 ranks; none of torch's optimizers has stepped"
    assert extent(Run(events, stuck=[])) == said


def test_a_probe_that_fails_leaves_the_script_alone(tmp_path: Path) -> None:
    script = str(
        written(
            tmp_path,
            """
class Batches:
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        raise RuntimeError("not known yet")


print([len(x) for x, y in DataLoader(dataset, batch_sampler=Batches())])
""",
        )
    )
    results = run_ranks(run_command, 2, script, backend=None)
    assert list(results) == [0, 0]
    assert all("[2, 2]\n" in output for output in results.outputs)
    assert "gave up watching: RuntimeError('not known yet')" in "".join(results.outputs)
