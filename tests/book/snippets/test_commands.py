"""Every shell command on the pages runs, as it stands, in a copy of the repository, offline.

What stands in for what cannot run here:

- `git clone repo:` clones this repository (a setting of git),
- `python3 -m venv` links the environment of the tests, `pip install` is checked, not done,
- `make` only says what it would do (`make -n`): it would run these tests inside of themselves, or
  serve for ever, or render and record what other tests do,
- node0.example is this machine, and the port of a rendezvous is a free one. The blocks of two
  machines are started at once,
- `python` and `torchrun` are forks of a process that has imported torch (tests/forked.py),
- `torchrun --nproc_per_node=gpu` starts two ranks,
- a stage trains for 3 steps: that its loss falls is what the runs show,
- `srun` starts its command once for each node of a job that has two, which are both this machine.

A block with `needs="…"` is skipped, with its reason.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ...forked import fast_bin
from .pages import ROOT, Fence, fences

MASTER = "node0.example"
PORT = re.compile(rf"(?<={MASTER}:)\d+|(?<=--master_port=)\d+")
SECONDS = 240
STAND_INS = r"""
set -euo pipefail
pip() { printf '%s\n' "$*" >> "$PIP_CALLS"; }
python3() {
    if [ "${1-} ${2-}" = "-m venv" ]; then ln -s "$ENVIRONMENT" "$3"; else command python3 "$@"; fi
}
make() { command make -n "$@"; }
torchrun() { command torchrun "${@/#--nproc_per_node=gpu/--nproc_per_node=2}"; }
scontrol() {
    if [ "$1" = show ]; then printf '127.0.0.1\n127.0.0.1\n'; else echo "$*" >> "$SLURM_CALLS"; fi
}
srun() {
    echo srun >> "$SLURM_CALLS"
    "$@" & local other=$!
    "$@" && wait "$other"
}
"""
WRONG = re.compile(r"command not found|No such file or directory|No module named|can't open file")


def launches(blocks: Sequence[Fence]) -> Iterator[list[Fence]]:
    """Blocks that are started together: those of two machines, or one alone."""
    waiting: Fence | None = None
    for block in blocks:
        if MASTER not in block.text or block.mark:
            yield [block]
        elif waiting:
            yield [waiting, block]
            waiting = None
        else:
            waiting = block
    if waiting:
        yield [waiting]


def grouped() -> dict[tuple[str, ...], list[list[Fence]]]:
    """Launches by their text: equal ones are run once."""
    groups: dict[tuple[str, ...], list[list[Fence]]] = {}
    for launch in launches(fences("bash")):
        groups.setdefault(tuple(block.text for block in launch), []).append(launch)
    return groups


GROUPS = list(grouped().values())


def places(group: list[list[Fence]]) -> str:
    return ",".join("+".join(block.place for block in launch) for launch in group)


def commands(text: str) -> list[str]:
    """The commands of a block, without comments and line breaks."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    return [line for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, with what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, encoding="utf-8",
    ).stdout  # fmt: skip
    folder = tmp_path_factory.mktemp("repository")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _fast() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(fast_bin()), prepend=os.pathsep)
        yield


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def free_job() -> str:
    """The number of a job whose port, by the rule of the runbook's script, is free."""
    for number in random.sample(range(1, 10_000), 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", 20_000 + number))
            return str(number)
    raise OSError("no free port between 20000 and 30000")


def environment(pip_calls: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "STEPS": "3",
        "PET_MASTER_PORT": free_port(),  # torchrun's default is one for all
        "ENVIRONMENT": sys.prefix,
        "PIP_CALLS": str(pip_calls),
        "SLURM_CALLS": str(pip_calls.with_name("slurm")),
        "SLURM_JOB_ID": free_job(),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": "repo:",
    }


def run(blocks: Sequence[str], folder: Path, scratch: Path) -> list[str]:
    """Start the blocks at once; what each of them printed. All must succeed."""
    port, calls = free_port(), scratch / "pip"
    outputs = [scratch / f"output{number}" for number in range(len(blocks))]
    running = []
    for block, output in zip(blocks, outputs, strict=True):
        text = PORT.sub(port, block).replace(MASTER, "127.0.0.1")
        with output.open("w") as file:
            running.append(
                subprocess.Popen(
                    ["bash", "-c", STAND_INS + text], cwd=folder, env=environment(calls),
                    stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                )
            )  # fmt: skip
    stop = time.monotonic() + SECONDS
    codes: list[int | str] = []
    for process in running:
        try:
            codes.append(process.wait(max(0.1, stop - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(f"still running after {SECONDS} seconds")
            end(process)
    texts = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
    for block, code, text in zip(blocks, codes, texts, strict=True):
        if code != 0 or WRONG.search(text):
            pytest.fail(f"{block}\nexit status: {code}\n\n{text[-6000:]}", pytrace=False)
    for call in calls.read_text().splitlines() if calls.exists() else []:
        check_pip_install(call)
    return texts


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends its ranks when it is asked to."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, order)
            process.wait(20)
            return


def check_pip_install(call: str) -> None:
    """`pip install -e .[train]`: pyproject.toml has to have that extra."""
    target = re.fullmatch(r"install -e \.\[(\w+)\]", call)
    assert target, f"pip {call}: this test only knows pip install -e '.[extra]'"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert re.search(rf"^{target[1]} = ", extras, re.MULTILINE), f"there is no extra {target[1]}"


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("group", GROUPS, ids=places)
def test_commands_run(
    group: list[list[Fence]], copy: Path, tmp_path: Path, executed: Counter[str]
) -> None:
    blocks = group[0]
    listed = [command for block in blocks for command in commands(block.text)]
    assert listed
    if blocks[0].mark:
        assert subprocess.run(["bash", "-n", "-c", blocks[0].text]).returncode == 0
        executed["commands not executed, with a reason"] += len(listed)
        pytest.skip(f"needs {blocks[0].mark}: {listed[0]}")
    for block in blocks:
        assert MASTER not in block.text or len(blocks) == 2, "the block of the other machine?"
        for name in re.findall(r"\bRUN=(\S+)", block.text):
            assert (ROOT / "runs" / f"{name}.py").is_file(), f"there is no run {name}"
    run([block.text for block in blocks], copy, tmp_path)
    made = [command for command in listed if command.startswith("make ")]
    executed["commands executed"] += len(listed) - len(made)
    executed["commands of make, checked with make -n"] += len(made)
    executed["launches on two machines"] += len(blocks) == 2


@pytest.mark.parametrize(
    "block",
    [
        "false\necho",
        "torchrun --standalone --nproc_per_node=1 runs/none.py || true",
        "make recrod",
        "pip install -e '.[trian]'",
        "pip install miniddp",
    ],
)
def test_what_does_not_run_is_noticed(block: str, copy: Path, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run([block], copy, tmp_path)


def block_with(text: str) -> str:
    (found,) = {block.text for block in fences("bash") if text in block.text}
    return found


def wait_for(file: Path, text: str, count: int = 1) -> str:
    """The file's text, once the text stands in it that often."""
    stop = time.monotonic() + SECONDS
    while time.monotonic() < stop:
        said = file.read_text(encoding="utf-8") if file.exists() else ""
        if said.count(text) >= count:
            return said
        time.sleep(0.1)
    return pytest.fail(f"{text!r} is not in {file.name} after {SECONDS} s: {said}", pytrace=False)


def wait_until_it_listens(port: int) -> None:
    stop = time.monotonic() + SECONDS
    while time.monotonic() < stop:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port)).close()
        time.sleep(0.1)
    return pytest.fail(f"nothing listens at port {port} after {SECONDS} s", pytrace=False)


def start(text: str, folder: Path, output: Path, **variables: str) -> subprocess.Popen[bytes]:
    calls = output.with_name("pip")
    with output.open("wb") as file:
        return subprocess.Popen(
            ["bash", "-c", STAND_INS + text], cwd=folder,
            env={**environment(calls), **variables}, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip


@pytest.mark.timeout(2 * SECONDS)
def test_a_slurm_job_leaves_in_time_and_goes_on_when_it_is_started_again(
    copy: Path, tmp_path: Path
) -> None:
    text = block_with("#SBATCH --signal")
    output, calls, job = tmp_path / "output", tmp_path / "slurm", copy / "build" / "slurm"
    shutil.rmtree(job, ignore_errors=True)

    script = start(text, copy, output)
    wait_for(calls, "srun")
    os.kill(script.pid, signal.SIGUSR1)  # as SLURM does before the time limit
    assert script.wait(SECONDS) == 0, output.read_text()
    assert "step 10 of 400" in output.read_text()
    assert re.fullmatch(r"srun\nrequeue \d+\n", calls.read_text())

    assert start(text, copy, output).wait(SECONDS) == 0, output.read_text()
    assert "step 400 of 400" in output.read_text()
    assert calls.read_text().splitlines()[2:] == ["srun"], "a job that is done asks for nothing"

    assert start(text, copy, output).wait(SECONDS) == 0
    assert calls.read_text().count("srun") == 2, "the rest of a chain ends at once"


UNTIL_ENOUGH = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
enough = torch.zeros(1)
while not enough:
    time.sleep(0.1)
    enough = torch.tensor(float(os.path.exists("enough")))
    dist.all_reduce(enough)
dist.destroy_process_group()
"""


@pytest.mark.timeout(2 * SECONDS)
def test_a_spare_machine_takes_the_place_of_one_that_died(tmp_path: Path) -> None:
    text = block_with("--rdzv_id=job")
    (tmp_path / "train.py").write_text(UNTIL_ENOUGH, encoding="utf-8")
    text = text.replace("=gpu", "=1").replace("runs/preemptible.py build/two", "train.py")
    port = free_port()
    text = PORT.sub(port, text).replace(MASTER, "127.0.0.1")
    outputs = [tmp_path / f"machine{number}" for number in range(3)]
    machines = []
    try:
        machines.append(start(text, tmp_path, outputs[0]))
        wait_until_it_listens(int(port))  # the first machine holds the store, and stays
        machines.append(start(text, tmp_path, outputs[1]))
        said = wait_for(outputs[1], "is process")
        machines.append(start(text, tmp_path, outputs[2]))
        os.killpg(machines[1].pid, signal.SIGKILL)
        os.kill(int(said.split("is process ")[1].split()[0]), signal.SIGKILL)
        wait_for(outputs[2], "is process")
        (tmp_path / "enough").touch()
        assert [machines[number].wait(SECONDS) for number in (0, 2)] == [0, 0]
    finally:
        for machine in machines:
            end(machine)
