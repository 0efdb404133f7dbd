"""The program that grows: each stage trains as the first one, on any number of ranks."""

import contextlib
import io
import operator
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
from torch.utils import _pytree as pytree

import miniddp
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


def run_with_torchs_class(rank, stage):
    torch.set_num_threads(1)
    miniddp.DistributedDataParallel = nn.parallel.DistributedDataParallel
    miniddp.DistributedSampler = torch.utils.data.DistributedSampler
    sys.argv = [str(stage)]
    runpy.run_path(str(stage), run_name="__main__")


@pytest.mark.parametrize("stage", STAGES[7:9], ids=lambda stage: stage.stem)
def test_with_torchs_class_a_stage_has_the_same_loss_and_ends(stage, alone):
    output, _ = run_ranks(run_with_torchs_class, 2, stage, backend=None, timeout=120).outputs
    assert losses(output)[0] == pytest.approx(alone, abs=1e-3)


def test_the_last_stage_resumes_with_either_class_and_on_more_ranks(tmp_path):
    """Two steps, and the third after a resume, give what three steps give."""
    last, ours = STAGES[-1], ["--ddp", "miniddp"]
    folder = ["--checkpoints", str(tmp_path / "two")]
    other_folder = ["--checkpoints", str(tmp_path / "ours")]
    two, resumed, whole, _, of_ours = printed(
        2,
        [last, *folder, "--steps", "2"],
        [last, *folder],
        [last],
        [last, *other_folder, *ours, "--steps", "2"],
        [last, *other_folder, *ours],
    )[0]
    assert losses(two) != losses(whole)
    assert "starts after step 2" in resumed
    assert losses(resumed) == losses(whole)
    assert losses(of_ours) == pytest.approx(losses(whole), abs=1e-3)
    for path in (tmp_path / "two").glob("step-00000003-*"):
        path.unlink()
    (on_three,) = printed(3, [last, *folder])[0]
    assert "starts after step 2" in on_three
    assert losses(on_three) == pytest.approx(losses(whole), abs=1e-3)


class Augmented(torch.utils.data.Dataset):
    """Sequences of which each reading changes some tokens, at random."""

    def __init__(self, sequences):
        self.sequences = sequences
        self.shape = sequences.shape

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        sequence = self.sequences[index].clone()
        sequence[torch.randint(len(sequence), (9,))] = torch.randint(500, (9,))
        return sequence


def train_augmented(rank, workers, folder, *stops):
    """The last stage, started once for each of the stops, on epochs of four steps."""
    torch.set_num_threads(1)
    train, test = shakespeare.load_text()
    for stop in stops:
        script = runpy.run_path(str(STAGES[-1]))["main"].__globals__
        script["load_text"] = lambda: (Augmented(train[:48]), test[:3])
        script["DataLoader"] = partial(
            torch.utils.data.DataLoader,
            multiprocessing_context="fork" if workers else None,
        )
        script["evaluate"] = lambda *_: 0
        script["start"] = lambda: torch.device("cpu")
        script["dist"] = SimpleNamespace(**vars(dist) | {"destroy_process_group": lambda: None})
        arguments = ["--steps", stop, "--batch", "12", "--accumulation", "2", "--workers", workers]
        sys.argv = [*map(str, [STAGES[-1], *arguments]), "--checkpoints", folder]
        script["main"]()
    (last,) = Path(folder).glob(f"step-{stops[-1]:08d}-*.pt")
    return torch.load(last)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_of_the_last_stage_augments_as_the_undisturbed_one_bit_for_bit(tmp_path, workers):
    """Stopped in an epoch, at its end, and in the next one."""
    ends = [
        run_ranks(train_augmented, 2, workers, str(tmp_path / str(len(stops))), *stops)[0]
        for stops in ((11,), (3, 4, 6, 11))
    ]
    straight, resumed = map(leaves, ends)
    assert straight.keys() == resumed.keys()
    assert len(straight) > 100
    for name, value in straight.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert equal(value, resumed[name]), name


def leaves(state) -> dict[str, object]:
    return {pytree.keystr(path): value for path, value in pytree.tree_leaves_with_path(state)}


def test_the_last_stage_keeps_two_checkpoints(tmp_path):
    (saved,) = run_ranks(save_three, 1, tmp_path)
    assert [name[:13] for name in saved] == ["step-00000002", "step-00000003"]


def save_three(rank, folder):
    script = runpy.run_path(str(STAGES[-1]))
    for step in (1, 2, 3):
        script["save"](folder, {"step": step})
    return sorted(os.listdir(folder))


def overflow(rank):
    script = runpy.run_path(str(STAGES[-1]))
    model = nn.Linear(1, 1)
    model.no_sync = contextlib.nullcontext
    nn.init.zeros_(model.bias)

    def accumulate(*_):
        model.weight.grad = torch.full((1, 1), torch.inf)
        model.bias.grad = torch.ones(1)
        return torch.zeros(())

    script["train_step"].__globals__["accumulate"] = accumulate
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    script["train_step"](model, optimizer, [None], SimpleNamespace(clip=0))
    return model.bias.item()


def test_without_a_bound_an_infinite_gradient_spoils_its_own_parameter_alone():
    assert overflow(0) == -1


class MeanToken(nn.Linear):
    """Its loss is the mean of the tokens."""

    def forward(self, input_ids, labels):
        return SimpleNamespace(loss=labels.float().mean())


def evaluate(rank, sequences):
    last = runpy.run_path(str(STAGES[-1]))
    return last["evaluate"](MeanToken(1, 1), sequences, SimpleNamespace(amp=False))


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_last_stage_counts_each_held_out_sequence_once(world_size):
    sequences = torch.randint(7, (77, 9), generator=torch.Generator().manual_seed(0))
    for found in run_ranks(evaluate, world_size, sequences):
        assert found == pytest.approx(sequences.double().mean().item())


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.stem)
def test_a_stage_is_read_on_a_page(stage):
    code = stage.read_text()
    assert code.count("\n") <= LIMITS.get(stage.name, 100)
    assert max(map(len, code.splitlines())) <= 80
    assert f"stages/{stage.name}" in code, "how to run it"
