"""*In PyTorch you write*: the programs behind these sections, on two ranks."""

import mmap
import os
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from miniddp import run_ranks
from miniddp.launch import RanksFailed

from .programs import run_on_ranks

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "runs/pytorch").glob("[0-9]*.py"))
SCRIPT = ROOT / "runs/pytorch/your_script_ddp.py"
CHAPTERS = sorted((ROOT / "chapters").glob("[0-9]*.qmd"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_program_holds_what_it_asserts(program: Path) -> None:
    run_on_ranks(program)


@pytest.mark.parametrize("ranks", [3, 4])
def test_the_ring_adds_up_where_the_neighbours_are_two(ranks: int) -> None:
    """On two ranks left and right are the same, and a wrong chunk would not show."""
    run_on_ranks(ROOT / "runs/pytorch/05_ring.py", ranks)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_program_is_plain_torch_and_asserts_what_its_chapter_says(program: Path) -> None:
    code = program.read_text(encoding="utf-8")
    assert "miniddp" not in code
    assert re.search(r"\bassert(_close\(| )", code)
    assert f"torchrun --standalone --nproc_per_node=2 runs/pytorch/{program.name}\n" in code
    number = program.name[:2]
    (chapter,) = [path for path in CHAPTERS if path.name.startswith(number)]
    text = chapter.read_text(encoding="utf-8")
    section = text.partition("\n## In PyTorch you write {#sec-")[2].partition("\n## ")[0]
    assert re.search(rf'file="runs/pytorch/{program.name}" symbol="', section)


def wrap_with_detail(rank: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo")
    DistributedDataParallel(nn.Linear(1, 1))


def test_with_detail_torchs_class_crashes_over_gloo() -> None:
    """Chapter 2 says so: when torch has mended it, this test says that the page is out of date."""
    with pytest.raises(RanksFailed, match="SIGSEGV"):
        run_ranks(wrap_with_detail, 2, backend=None, timeout=120)


def names_of_the_reducer() -> list[str]:
    """What *Inside the class* says of `reducer.cpp`: the last column of its table."""
    page = (ROOT / "appendix/inside.qmd").read_text(encoding="utf-8")
    rows = [row.split("|") for row in page.splitlines() if row.startswith("  | ")]
    return sorted({name for row in rows[2:] for name in re.findall(r"`(\w+)`", row[-2])})


def test_torch_has_the_names_of_the_reducer() -> None:
    names = names_of_the_reducer()
    assert len(names) > 15
    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for name in names:
            mangled = f"{len(name)}{name}E".encode()
            found = data.find(b"c10d7Reducer" + mangled) >= 0 or data.find(b"4c10d" + mangled) >= 0
            assert found, name


State = dict[str, torch.Tensor]


def run_script(rank: int, folder: Path, code: str) -> State:
    os.chdir(folder)
    names = {"__name__": "a script"}
    exec(compile(code, "your_script_ddp.py", "exec"), names)
    build = nn.Sequential
    built = []
    nn.Sequential = lambda *layers: built.append(build(*layers)) or built[-1]
    names["main"]()
    return built[0].state_dict()


def train(folder: Path, ranks: int, *change: str) -> list[tuple[str, State]]:
    """What each rank prints, and its weights at the end."""
    code = SCRIPT.read_text(encoding="utf-8")
    if change:
        assert code.count(change[0]) == 1
        code = code.replace(*change)
    ended = run_ranks(run_script, ranks, folder, code, backend=None, timeout=120)
    return list(zip(ended.outputs, ended, strict=True))


def are_equal(first: State, second: State) -> bool:
    return all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, State]:
    return train(tmp_path_factory.mktemp("alone"), 1)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_converted_script_trains_as_one_process(alone, ranks, tmp_path) -> None:
    printed, weights = alone
    for rank, (output, replica) in enumerate(train(tmp_path, ranks)):
        assert output == (printed if rank == 0 else "")
        assert are_equal(replica, weights)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert are_equal(saved, weights)


def test_the_script_for_one_gpu_learns_as_much(alone, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SCRIPT.with_name("your_script.py")), run_name="__main__")
    last = [float(text.split()[-1]) for text in (alone[0], capsys.readouterr().out)]
    assert last[0] == pytest.approx(last[1], rel=0.05)


SAMPLER = "sampler = DistributedSampler(train, drop_last=True)"
MISTAKES = {  # what is changed, and whether the replicas are equal all the same
    "past the wrapper": ("outputs = ddp(", "outputs = model(", False),
    "no sampler": (
        SAMPLER,
        "sampler = torch.utils.data.RandomSampler(train); sampler.set_epoch = print",
        True,
    ),
    "no set_epoch": ("sampler.set_epoch(epoch)", "pass", True),
    "the rank as the seed": (
        SAMPLER,
        "sampler = DistributedSampler(train, seed=dist.get_rank(), drop_last=True)",
        True,
    ),
    "the batch is not divided": ("batch = BATCH // dist.get_world_size()", "batch = BATCH", True),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_checklist_is_silent_and_trains_otherwise(name, alone, tmp_path) -> None:
    *change, equal = MISTAKES[name]
    first, second = [replica for _, replica in train(tmp_path, 2, *change)]
    assert are_equal(first, second) == equal
    assert not are_equal(first, alone[1])


def test_a_metric_of_one_part_is_not_that_of_all(alone, tmp_path) -> None:
    printed = train(tmp_path, 2, "dist.all_reduce(total)", "pass")[0][0]
    assert printed.count("test loss") == alone[0].count("test loss") > 1
    assert printed != alone[0]
