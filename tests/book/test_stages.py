"""The program that grows: each stage trains as the first one, on any number of ranks."""

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import _rendezvous_handlers

import shakespeare
from miniddp import run_ranks

STAGES = sorted((Path(__file__).parents[2] / "stages").glob("[0-9]_*.py"))
FIRST, *SHARED = STAGES
LIMITS = {"9_train.py": 300}
NAME = "the stage is "


@pytest.fixture(autouse=True, scope="module")
def few_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPS", "3")
        yield


def meet(file, *_, **__):
    """In a file of this program's own: the launcher's store knows the last one's addresses."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    yield dist.FileStore(file, world_size), rank, world_size


def run(rank, folder, programs):
    """One after the other in the same processes, each with a process group of its own."""
    torch.set_num_threads(1)
    shakespeare.load_text = cache(shakespeare.load_text)  # it trains the tokenizer: once is enough
    for number, (stage, *arguments) in enumerate(programs):
        print(f"{NAME}{stage.stem}")
        _rendezvous_handlers["env"] = partial(meet, f"{folder}/{number}")
        sys.argv = [str(stage), *arguments]
        runpy.run_path(str(stage), run_name="__main__")


def printed(world_size, *programs):
    """What each rank printed in each of the programs."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(run, world_size, folder, programs, backend=None, timeout=600)
    return [output.split(NAME)[1:] for output in ended.outputs]


def losses(output):
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.fixture(scope="module")
def alone():
    """What stage 0 prints: the loss before the last step."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(FIRST), run_name="__main__")
    (loss,) = losses(output.getvalue())
    return loss


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} ranks".format)
def outputs(request):
    return printed(request.param, *[[stage] for stage in SHARED])


@pytest.mark.parametrize("number", range(1, len(STAGES)))
def test_every_stage_has_the_loss_of_one_process(number, outputs, alone):
    spoken, *silent = [output[number - 1] for output in outputs]
    loss, *held_out = losses(spoken)
    assert loss == pytest.approx(alone, abs=1e-3)
    assert len(held_out) == (number > 2)
    assert held_out == losses(outputs[0][-1])[1:] * (number > 2), "evaluated alike by every stage"
    assert not any(map(losses, silent)), "rank 0 alone speaks"


def test_stage_1_is_off_by_rounding_alone(outputs):
    off = re.findall(r"off by (\S+) at most in torch\.(\w+)", outputs[0][0])
    assert [dtype for _, dtype in off] == ["float32", "float64"]
    assert all(float(difference) < 1e-7 for difference, _ in off)


def test_the_last_stage_resumes(tmp_path):
    """Two steps, and the third after a resume, give what three steps give."""
    last, folder = STAGES[-1], ["--checkpoints", str(tmp_path)]
    two, resumed, whole = printed(2, [last, *folder, "--steps", "2"], [last, *folder], [last])[0]
    assert losses(two) != losses(whole)
    assert "resumed after step 2" in resumed
    assert losses(resumed) == losses(whole)


class Parrot(nn.Module):
    """Expects each token to come again."""

    def forward(self, input_ids, labels):
        logits = nn.functional.one_hot(input_ids, 7).float()
        return SimpleNamespace(loss=labels.float().mean(), logits=logits)


def evaluate(rank, sequences):
    last = runpy.run_path(str(STAGES[-1]))
    return last["evaluate"](Parrot(), sequences, SimpleNamespace(amp=False))


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_last_stage_counts_what_the_model_finds(world_size):
    sequences = torch.randint(7, (5, 9), generator=torch.Generator().manual_seed(0))
    right = (sequences[:, :-1] == sequences[:, 1:]).double().mean().item()
    assert 0 < right < 1
    for found in run_ranks(evaluate, world_size, sequences):
        assert found == pytest.approx([sequences.double().mean().item(), right])


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.stem)
def test_a_stage_is_read_on_a_page(stage):
    code = stage.read_text()
    assert code.count("\n") <= LIMITS.get(stage.name, 100)
    assert max(map(len, code.splitlines())) <= 80
    assert f"stages/{stage.name}" in code, "how to run it"
