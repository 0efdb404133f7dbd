import errno
import functools
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

from finetune import checkpoint
from finetune.checkpoint import random_state
from finetune.state_file import CheckpointError, read_state, write_state
from miniddp import DistributedSampler, SimpleDDP
from miniddp.launch import RanksFailed
from miniddp.process import destroy_process_group, device, init_process_group, set_seed

from ..package.ranks import run

SAMPLES, BATCH = 23, 5  # on two ranks: three steps in an epoch, the last batch is short


# The file


def difference(left, right, name: str = "") -> str | None:
    """Where two states are not alike bit for bit in type, structure and value."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same_kind = (left.dtype, left.shape) == (right.dtype, right.shape)
        return None if same_kind and bytes_of(left) == bytes_of(right) else name
    if isinstance(left, dict) and type(left) is type(right):
        if list(left) != list(right):
            return f"{name}: {list(left)} and {list(right)}"
        left, right = [*left.items()], [*right.items()]
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        if len(left) != len(right):
            return name
        found = (
            difference(*pair, f"{name}.{i}") for i, pair in enumerate(zip(left, right, strict=True))
        )
        return next(filter(None, found), None)
    same = type(left) is type(right) and (left == right or (left != left and right != right))
    return None if same else f"{name}: {left!r} and {right!r}"


def assert_equal(left, right) -> None:
    assert difference(left, right) is None


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(memory(tensor.contiguous()))


def memory(contiguous: torch.Tensor) -> memoryview:
    return contiguous.reshape(-1).view(torch.uint8).numpy().data


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.empty(draw(st.lists(st.integers(0, 3), max_size=3)), dtype=dtype)
    data = draw(st.binary(min_size=tensor.nbytes, max_size=tensor.nbytes))
    if dtype == torch.bool:
        data = bytes(byte % 2 for byte in data)
    memory(tensor)[:] = data
    return tensor


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
states = st.recursive(
    plain | tensors(),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(
            st.text() | st.integers() | st.tuples(st.integers(), st.text()), parts, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(state=states)
def test_a_state_comes_back_bit_for_bit(tmp_path_factory, state):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_state(path, state)
    assert_equal(read_state(path)[0], state)


def test_the_safetensors_library_reads_the_tensors(tmp_path):
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).to(torch.bfloat16)
    write_state(tmp_path / "a", {"model": module.state_dict(), "view": torch.eye(4)[:, 1:3]})
    loaded = safetensors.torch.load_file(tmp_path / "a")
    expected = {f"state.model.{name}": value for name, value in module.state_dict().items()}
    expected["state.view"] = torch.eye(4)[:, 1:3]
    assert_equal(dict(sorted(loaded.items())), dict(sorted(expected.items())))


@pytest.mark.parametrize(
    "view", [lambda t: t[::2], lambda t: t[:1].expand(5), lambda t: t.view(2, 3).T, lambda t: t[3:]]
)
def test_a_view_is_saved_as_what_it_shows(tmp_path, view):
    tensor = view(torch.arange(6.0))
    write_state(tmp_path / "a", tensor)
    assert_equal(read_state(tmp_path / "a")[0], tensor.clone())


def test_names_that_collide_are_kept_apart(tmp_path):
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), 1: torch.ones(2), "1": torch.ones(3)}
    write_state(tmp_path / "a", state)
    assert_equal(read_state(tmp_path / "a")[0], state)


def test_tied_tensors_are_read_into_memory_of_their_own(tmp_path):
    weight = torch.arange(3.0)
    write_state(tmp_path / "a", [weight, weight, weight[1:]])
    first, second, part = read_state(tmp_path / "a")[0]
    first.zero_()
    assert (second.tolist(), part.tolist()) == ([0, 1, 2], [1, 2])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {2}]}, r"state\.a\.1 cannot be saved: it is a set"),
        ({"a": np.int64(3)}, r"state\.a cannot be saved: it is a int64"),
        ({"f": len}, r"state\.f cannot be saved: it is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        write_state(tmp_path / "a", state)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "a"
    write_state(path, {"weight": torch.arange(5.0), "step": 3})
    return path.read_bytes()


def test_any_flipped_bit_is_detected(tmp_path, whole):
    path = tmp_path / "a"
    for place in range(len(whole)):
        for bit in (0, 3, 7):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
                read_state(path)
            assert "\n" not in str(caught.value)


def test_any_missing_or_added_end_is_detected(tmp_path, whole):
    path = tmp_path / "a"
    for data in [*(whole[:end] for end in range(len(whole))), whole + b"\0", whole + whole]:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_state(path)


@given(data=st.binary(max_size=300))
@settings(deadline=None)
def test_random_bytes_are_no_checkpoint(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "random"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read_state(path)


def forged(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def about(structure: str) -> dict[str, object]:
    """A header whose digest is right where there is no tensor."""
    return {"__metadata__": {"state": sha256(structure.encode()).hexdigest() + structure}}


def of_tensor(dtype: str, shape: list[object], end: int) -> dict[str, object]:
    return {**about("null"), "a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": 1}), "no checkpoint"),
        (safetensors.torch.save({"a": torch.ones(2)}), "no checkpoint"),
        (forged([]), "no checkpoint"),
        (forged({"__metadata__": 3}), "no checkpoint"),
        (forged({"__metadata__": {"state": "null"}}), "no checkpoint"),
        (forged(about("[")), "no checkpoint"),
        (forged(about('{"tensor": "a"}')), "no checkpoint"),
        (forged(about('{"code": "a"}')), "an unknown kind of value"),
        (forged(about('{"dict": [[{"dict": []}, 1]]}')), "unhashable"),
        (forged(about("[" * 100_000)), "no checkpoint"),
        (forged(of_tensor("F32", [-1, -1], 4), b"1234"), "no checkpoint"),
        (forged(of_tensor("F32", [1.0], 4), b"1234"), "no checkpoint"),
        (forged(of_tensor("F32", [10**15], 4 * 10**15), b"1234"), "no checkpoint"),
        (forged(of_tensor("F32", [1], 4), b"12345"), "no checkpoint"),
        (b'{"json": 1}' + b" " * 90, "no checkpoint"),
    ],
)
def test_a_foreign_file_is_named(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_state(tmp_path / "a")


def test_a_file_that_cannot_be_opened_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path / "no")
    with pytest.raises(IsADirectoryError):
        read_state(tmp_path)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failure_at_any_point_leaves_the_old_file(tmp_path, monkeypatch, fails):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_state(tmp_path / "a", "old")
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if fails == "fsync" else (Path, "replace")), no_space)
        with pytest.raises(OSError, match="No space left"):
            write_state(tmp_path / "a", "new")
    assert read_state(tmp_path / "a")[0] == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_file_and_folder_are_forced_to_the_disk_around_the_renaming(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (events.append("rename"), replace(self, to))
    )
    write_state(tmp_path / "a", "new")
    unfinished, *rest = events
    assert re.fullmatch(rf"{tmp_path}/a\..*\.unfinished/a", unfinished)
    assert rest == ["rename", str(tmp_path)]


def test_a_folder_that_cannot_be_forced_to_the_disk_is_no_failure_and_leaves_nothing_open(
    tmp_path, monkeypatch
):
    def of_files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", of_files_only)
    before = os.listdir("/proc/self/fd")
    write_state(tmp_path / "a", "new")
    assert read_state(tmp_path / "a")[0] == "new"
    assert os.listdir("/proc/self/fd") == before


def test_reading_holds_one_copy_in_memory(tmp_path):
    """Where the file may take 2.5 times its size of address space, a map of it included."""
    size = 64 * 2**20
    write_state(tmp_path / "a", torch.zeros(size // 4))

    def read(rank):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + int(2.5 * size)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return read_state(tmp_path / "a")[0].nbytes

    assert run(read, 1, default_device=False) == [size]


# Training that goes on


class Place:
    """The sampler's place as of the batches that were trained on."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self.sampler = sampler
        self.consumed = 0

    def state_dict(self):
        return self.sampler.state_dict(consumed=self.consumed)

    def load_state_dict(self, state) -> None:
        self.sampler.load_state_dict(state)


class Training:
    """A small training with everything that has a state: dropout, momentum, schedule, shuffle."""

    def __init__(self, rank: int) -> None:
        set_seed(0)
        layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 1)
        self.model = SimpleDDP(nn.Sequential(*layers).to(device()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=40)
        dataset = TensorDataset(torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 1))
        self.sampler = DistributedSampler(dataset, seed=3)
        order = torch.Generator().manual_seed(7)
        self.loader = DataLoader(dataset, BATCH, sampler=self.sampler, generator=order)
        self.place = Place(self.sampler)
        self.objects = {"model": self.model.module, "optimizer": self.optimizer}
        self.objects |= {"scheduler": self.scheduler, "place": self.place}
        self.step = 0
        self.noise: list[tuple[float, float]] = []
        set_seed(0, rank_offset=1 + rank)

    def run(self, steps: int) -> None:
        """Train; the loop takes a batch that it does not train on any more."""
        last = self.step + steps
        for epoch in itertools.count(self.sampler.epoch):
            self.sampler.set_epoch(epoch)
            self.place.consumed = self.sampler.state_dict()["consumed"]
            for inputs, targets in self.loader:
                if self.step == last:
                    return
                self.train_step(inputs, targets)
                self.place.consumed += len(inputs)

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        inputs, targets = inputs.to(device()), targets.to(device())
        self.noise.append((random.random(), float(np.random.rand())))
        inputs = inputs + sum(self.noise[-1]) * torch.randn_like(inputs)
        (self.model(inputs) - targets).square().mean().backward()
        self.model.sync_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1

    def save(self, folder: Path) -> Path:
        return checkpoint.save(folder, self.step, self.objects)

    def load(self, found: checkpoint.Checkpoint) -> int:
        self.step = checkpoint.load(found, self.objects)
        return self.step

    def state(self):
        states_ = {name: value.state_dict() for name, value in self.objects.items()}
        return {**states_, "random": random_state(), "step": self.step}


def straight(rank: int, steps: int):
    training = Training(rank)
    training.run(steps)
    return training.state(), training.noise


def until_save(rank: int, steps: int, folder: Path):
    training = Training(rank)
    training.run(steps)
    return training.save(folder)


def from_load(rank: int, folder: Path, steps: int):
    training = Training(rank)
    torch.rand(5 + rank)
    restored = training.load(checkpoint.latest(folder))
    training.run(steps)
    return training.state(), training.noise, restored


@pytest.mark.parametrize(
    ("first", "then"),
    [(2, 3), (3, 3), (5, 4)],
    ids=["in the first epoch", "between epochs", "in the second epoch"],
)
def test_a_training_that_was_interrupted_goes_on_bit_for_bit(tmp_path, first, then):
    expected = run(straight, 2, first + then, default_device=False)
    paths = run(until_save, 2, first, tmp_path, default_device=False)
    assert paths == [tmp_path / f"step-{first:08d}.safetensors"] * 2
    assert list(tmp_path.iterdir()) == paths[:1]
    resumed = run(from_load, 2, tmp_path, then, default_device=False)
    for rank in range(2):
        state, noise, restored = resumed[rank]
        assert_equal(state, expected[rank][0])
        assert noise == expected[rank][1][first:]
        assert restored == first
    assert resumed[0][1] != resumed[1][1]  # every rank has random numbers of its own


def test_without_its_random_state_a_training_goes_another_way(tmp_path):
    expected = run(straight, 2, 6, default_device=False)
    run(until_save, 2, 3, tmp_path, default_device=False)

    def forgetful(rank):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "set_random_state", lambda _: None)
            return from_load(rank, tmp_path, 3)

    resumed = run(forgetful, 2, default_device=False)
    assert difference(resumed[0][0]["model"], expected[0][0]["model"])


# What may go wrong, on every rank


def messages(rank, fn, *args):
    """The error of a call on this rank, and that the process group still works after it."""
    try:
        fn(rank, *args)
        text = ""
    except (ValueError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    count = torch.ones(())
    dist.all_reduce(count)
    assert int(count) == dist.get_world_size()
    return text


def on_every_rank(world_size, fn, *args) -> str:
    """The one message of all ranks; it is one line."""
    results = run(messages, world_size, fn, *args)
    assert len(set(results)) == 1, results
    assert "\n" not in results[0]
    return results[0]


def load_into(rank, path):
    Training(rank).load(checkpoint.read(path))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return run(until_save, 2, 3, tmp_path_factory.mktemp("saved"), default_device=False)[0]


def test_another_world_size_is_refused_with_both_sizes(saved):
    message = on_every_rank(3, load_into, saved)
    assert message == (
        f"CheckpointError: cannot load {saved}: saved on 2 ranks, now there are 3: only an "
        "elastic resume goes on"
    )


def test_what_the_ranks_share_can_be_read_without_any_rank(saved):
    state, _ = read_state(saved)
    assert (state["step"], len(state["random_states"])) == (3, 2)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 1))
    model.load_state_dict(state["shared"]["model"])


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)


def longer(path):
    path.write_bytes(path.read_bytes() + b"more")


def foreign(path):
    torch.save({"model": {}}, path)


def other_state(path):
    write_state(path, {"model": {}})


def of_the_old_trainer(path):
    """As `miniddp.train` wrote it: without a format, and with other parts."""
    state, _ = read_state(path)
    del state["format"]
    shared = {**state["shared"], "place": {"epoch": 0, "consumed": 12}}
    write_state(path, {**state, "shared": shared})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, "is damaged or no checkpoint: "),
        (longer, "is damaged or no checkpoint: "),
        (flip, "is damaged or no checkpoint: its SHA-256 is another"),
        (foreign, "is damaged or no checkpoint: "),
        (other_state, "is no checkpoint of a training"),
        (of_the_old_trainer, "its format is 1, this version of finetune has 2: go on with the"),
        (os.remove, "No such file or directory"),
    ],
)
def test_a_bad_file_is_named_on_every_rank(tmp_path, saved, harm, words):
    path = tmp_path / saved.name
    shutil.copy(saved, path)
    harm(path)
    message = on_every_rank(2, load_into, path)
    assert words in message
    assert str(path) in message
    assert message.startswith(("CheckpointError: ", "DamagedError: "))


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (RuntimeError(ALLOCATOR), ALLOCATOR),
        (MemoryError(), "MemoryError"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_what_is_no_damage_stops_every_rank_and_no_older_checkpoint_is_taken(
    tmp_path, problem, words
):
    def newest(rank):
        for step in (8, 12):
            save_small(rank, tmp_path, step)
        read = checkpoint.read_state

        def read_until_12(path):
            if "12" in path.name:
                raise problem
            return read(path)

        checkpoint.read_state = read_until_12
        checkpoint.latest(tmp_path)

    message = on_every_rank(2, newest)
    where = f"cannot read {tmp_path}/step-00000012.safetensors: rank 0: "
    assert message == f"CheckpointError: {where}{words}"


@pytest.mark.parametrize("ranks_without_room", [[0], [1]])
def test_a_rank_without_room_for_the_state_stops_every_rank(saved, ranks_without_room):
    def load(rank):
        found = checkpoint.read(saved)
        if rank in ranks_without_room:
            checkpoint.tree_map_only = full
        Training(rank).load(found)

    def full(kind, function, state):
        if function is not torch.clone and not isinstance(function, functools.partial):
            return tree_map_only(kind, function, state)
        raise RuntimeError(ALLOCATOR)

    message = on_every_rank(2, load)
    who = f"rank {ranks_without_room[0]}"
    assert message == f"CheckpointError: cannot load {saved}: {who}: {ALLOCATOR}"


def test_rank_0_reads_a_file_once_and_the_others_never(tmp_path, saved):
    """Rank 1's folder is empty: what it loads has come from rank 0."""

    def resume(rank):
        own = tmp_path / str(rank)
        own.mkdir()
        if rank == 0:
            shutil.copy(saved, own)
        os.chdir(own)
        opened = []
        read = checkpoint.read_state
        checkpoint.read_state = lambda path: opened.append(path) or read(path)
        training = Training(rank)
        restored = training.load(checkpoint.latest("."))
        return restored, len(opened), training.model.module[0].weight.tolist()

    first, second = run(resume, 2, default_device=False)
    assert (first[:2], second[:2]) == ((3, 1), (3, 0))
    weight = read_state(saved)[0]["shared"]["model"]["0.weight"]
    assert first[2] == second[2] == weight.tolist()


def test_a_file_that_rank_0_does_not_see_and_another_does_is_not_left_out(tmp_path, saved):
    """Rank 0's machine has an old list of a shared folder, or each a folder of its own."""

    def newest(rank):
        own = tmp_path / str(rank)
        own.mkdir()
        shutil.copy(saved, own / "step-00000003.safetensors")
        if rank == 1:
            shutil.copy(saved, own / "step-00000006.safetensors")
        os.chdir(own)
        checkpoint.latest(".")

    message = on_every_rank(2, newest)
    assert message == (
        "CheckpointError: cannot read step-00000006.safetensors: rank 0: No such file or directory"
    )


def small(features: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, features), nn.Linear(features, 1))


def save_small(rank, folder, step=1, **options):
    return checkpoint.save(folder, step, {"model": small()}, **options)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"model": small(5)}, "size mismatch for 0.weight"),
        ({"model": small()[:1]}, "Unexpected key"),
        ({"model": nn.Sequential(*small(), nn.Linear(1, 1))}, "Missing key"),
    ],
)
def test_a_state_that_does_not_fit_is_named_on_every_rank(tmp_path, wanted, message):
    def load(rank):
        checkpoint.load(checkpoint.latest(tmp_path), wanted)

    run(save_small, 2, tmp_path)
    text = on_every_rank(2, load)
    assert re.search(message, text), text


def test_an_optimizer_that_does_not_fit_is_named_on_every_rank(saved):
    def load(rank):
        optimizer = torch.optim.SGD(small().parameters(), lr=1.0)
        checkpoint.load(checkpoint.read(saved), {"optimizer": optimizer})

    message = on_every_rank(2, load)
    assert message.startswith(f"CheckpointError: cannot load {saved}: loaded state dict")


def test_random_numbers_of_a_gpu_are_not_continued_on_a_cpu(tmp_path, saved):
    state, _ = read_state(saved)
    state["random_states"][1]["gpu"] = torch.zeros(16, dtype=torch.uint8)
    write_state(tmp_path / "gpu", state)
    message = on_every_rank(2, load_into, tmp_path / "gpu")
    assert "rank 1: its random states are not of a device like this" in message


class Broken:
    def state_dict(self):
        raise RuntimeError("no state\ntoday")


class Holder:
    """An object whose state is this."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def test_a_state_that_cannot_be_had_or_saved_is_named_on_every_rank(tmp_path):
    def save(rank, which):
        checkpoint.save(tmp_path, 2, {"model": which})

    where = f"CheckpointError: cannot save step 2 in {tmp_path}: "
    assert on_every_rank(2, save, Broken()) == where + "rank 0: no state today"
    assert on_every_rank(2, save, Holder({1})) == where + "rank 0: " + (
        "state.shared.model cannot be saved: it is a set, not a dense tensor or plain value"
    )
    assert "it is a Tensor, not a dense" in on_every_rank(2, save, Holder(torch.eye(2).to_sparse()))
    assert "meta" in on_every_rank(2, save, Holder(torch.ones(2, device="meta")))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    message = on_every_rank(2, save_small, tmp_path / "file")
    assert message == f"CheckpointError: cannot save step 1 in {tmp_path}/file: rank 0: File exists"


def test_a_file_that_outgrows_its_limit_leaves_the_old_checkpoint(tmp_path):
    def save(rank):
        save_small(rank, tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            save_small(rank, tmp_path, step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert checkpoint.latest(tmp_path).path == tmp_path / "step-00000001.safetensors"

    message = on_every_rank(2, save)
    assert message.startswith(f"CheckpointError: cannot save step 2 in {tmp_path}: ")
    assert "File too large" in message
    assert os.listdir(tmp_path) == ["step-00000001.safetensors"]
    assert read_state(tmp_path / "step-00000001.safetensors")[0]["step"] == 1


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB in memory; only root may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "miniddp-test", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint(small_disk):
    def save(rank):
        save_small(rank, small_disk)
        checkpoint.save(small_disk, 2, {"model": Holder(torch.zeros(20_000))})

    message = on_every_rank(2, save)
    assert message.startswith(f"CheckpointError: cannot save step 2 in {small_disk}: ")
    assert "No space left on device" in message
    assert os.listdir(small_disk) == ["step-00000001.safetensors"]
    assert read_state(small_disk / "step-00000001.safetensors")[0]["step"] == 1


@pytest.mark.parametrize("moment", ["safetensors writes", "fsync"])
def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_checkpoint(tmp_path, moment):
    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def write_a_file_of_its_own(_, path, __):
        path.with_name(".tmp1a").touch()
        kill()

    def killed(rank):
        save_small(rank, tmp_path)
        monkey = pytest.MonkeyPatch()
        if moment == "fsync":
            monkey.setattr(os, "fsync", kill)
        else:
            monkey.setattr(safetensors.torch, "save_file", write_a_file_of_its_own)
        save_small(rank, tmp_path, step=2)

    with pytest.raises(RanksFailed, match="SIGKILL"):
        run(killed, 2)
    old, unfinished = sorted(os.listdir(tmp_path))
    assert re.fullmatch(r"step-00000002\.safetensors\..*\.unfinished", unfinished)
    assert run(lambda rank: checkpoint.latest(tmp_path).path, 2) == [tmp_path / old] * 2

    def lock_and_save(rank):
        with checkpoint.locked(tmp_path):
            save_small(rank, tmp_path, 3)

    run(lock_and_save, 2)
    assert sorted(os.listdir(tmp_path)) == [".lock", old, "step-00000003.safetensors"]


@pytest.fixture
def alone():
    """This process as a group of one."""
    init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


def test_there_is_no_latest_checkpoint_in_an_empty_or_missing_folder(tmp_path, alone):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None
    (tmp_path / "step-one.safetensors").write_text("named otherwise")
    assert checkpoint.latest(tmp_path) is None


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(tmp_path, alone, caplog):
    for step in (9, 100_000_000, 10):
        save_small(0, tmp_path, step)
    newest = tmp_path / "step-100000000.safetensors"
    assert checkpoint.latest(tmp_path).path == newest
    assert caplog.messages == []
    cut(newest)
    assert checkpoint.latest(tmp_path).path == tmp_path / "step-00000010.safetensors"
    (message,) = caplog.messages
    assert message.startswith(f"skipped a checkpoint: {newest} is damaged or no checkpoint: ")


def test_only_damaged_checkpoints_are_an_error_on_every_rank(tmp_path):
    def newest(rank):
        checkpoint.latest(tmp_path)

    run(save_small, 2, tmp_path)
    cut(tmp_path / "step-00000001.safetensors")
    message = on_every_rank(2, newest)
    assert message.startswith(f"CheckpointError: no checkpoint in {tmp_path} is whole: ")
    assert "step-00000001.safetensors is damaged" in message


def test_the_last_few_are_kept_and_newer_ones_never_touched(tmp_path, alone):
    def steps():
        return sorted(int(path.stem.removeprefix("step-")) for path in tmp_path.iterdir())

    for step in (1, 2, 3):
        save_small(0, tmp_path, step, keep=3)
    save_small(0, tmp_path, 9, keep=4)
    save_small(0, tmp_path, 4, keep=2)
    assert steps() == [3, 4, 9]
    save_small(0, tmp_path, 4, keep=2)  # once more: in its own place
    assert steps() == [3, 4, 9]
    save_small(0, tmp_path, 10, keep=1)
    assert steps() == [10]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path, alone, caplog, monkeypatch
):
    def denied(path, **_):
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")

    save_small(0, tmp_path, 1)
    monkeypatch.setattr(Path, "unlink", denied)
    save_small(0, tmp_path, 2, keep=1)
    old = tmp_path / "step-00000001.safetensors"
    assert caplog.messages == [f"cannot remove the old {old}: Permission denied"]


def test_a_folder_that_is_deleted_right_after_a_save_is_made_anew_by_the_next(
    tmp_path, alone, monkeypatch
):
    folder, write = tmp_path / "saved", checkpoint.write_state

    def write_and_lose(path, state):
        write(path, state)
        shutil.rmtree(folder)

    monkeypatch.setattr(checkpoint, "write_state", write_and_lose)
    save_small(0, folder, 1, keep=1)
    assert not folder.exists()
    monkeypatch.undo()
    assert save_small(0, folder, 2, keep=1).exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: checkpoint.save(folder, 1, {}),
        checkpoint.read,
        checkpoint.latest,
    ],
)
def test_without_a_process_group_there_is_a_clear_error(tmp_path, call):
    with pytest.raises(RuntimeError, match="there is no process group: call miniddp"):
        call(tmp_path)
