"""A long training: memory, files and threads stay flat, checkpoints rotate, a resume equals it.

    python runs/soak.py --steps 20000

Two ranks of the tiny model train under torchrun, while their memory (resident, in MB), open files
and threads are read between the checkpoints. A second training begins with a checkpoint of the
first, is ended by SIGTERM, and the same command goes on.
"""

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from instruments.launched_jobs import ENVIRONMENT, Process, digest, file, ranks

INTERVALS = 20
FLAT = 0.02
Sample = dict[str, float]


def start(folder: Path, steps: int, number: int) -> Process:
    every = steps // INTERVALS
    program = ["-m", "finetune", "--model=tiny", "--batch-size=4", "--max-length=8"]
    program += [f"--epochs={steps}", f"--steps={steps}", f"--checkpoint-every={every}"]
    program += [f"--checkpoint={folder}", "--resume=auto"]
    launch = ["--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "FAULTS_COLD": "1"}
    return Process([*launch, *program], environment, folder.with_name(f"{folder.name}-{number}"))


def newest(folder: Path) -> int:
    """The step of the newest checkpoint."""
    names = folder.glob("step-*.safetensors") if folder.exists() else []
    return max((int(path.stem.removeprefix("step-")) for path in names), default=0)


def measure(pid: int) -> Sample:
    process = Path(f"/proc/{pid}")
    memory = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = (len(list((process / name).iterdir())) for name in ("fd", "task"))
    return {"MB": memory / 1e6, "files": files, "threads": threads}


def watch(process: Process, folder: Path, aside: Path, late: int) -> list[list[list[Sample]]]:
    """What each rank used in each interval between checkpoints: [interval][rank][sample].

    The first checkpoint that is `late` is copied into the folder `aside`.
    """
    seen: dict[int, list[list[Sample]]] = {}
    while process.code is None:
        step = newest(folder)
        if step >= late and not aside.exists():
            aside.mkdir()
            shutil.copy(folder / file(step), aside)
        of_interval = seen.setdefault(step, [[], []])
        pids = ranks(process.process.pid or 0)
        for samples, pid in zip(of_interval, pids[-2:], strict=False):
            try:
                samples.append(measure(pid))
            except OSError:  # it has just ended
                break
        time.sleep(0.1)
    return [seen[step] for step in sorted(seen)]


def curve(intervals: Sequence[Sequence[Sequence[Sample]]]) -> list[list[Sample]]:
    """The medians: [interval][rank]. The first interval, while all begins, and the last are out."""
    return [
        [
            {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
            for samples in of_interval
        ]
        for of_interval in intervals[1:-1]
        if all(of_interval)
    ]


def growth(points: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Each quantity in the last quarter over that in the second, of the rank that grew most."""
    quarter = max(1, len(points) // 4)
    early, late = points[quarter : 2 * quarter], points[-quarter:]
    return {
        name: max(
            statistics.mean(point[rank][name] for point in late)
            / statistics.mean(point[rank][name] for point in early)
            for rank in range(2)
        )
        for name in points[0][0]
    }


def soak(folder: Path, steps: int) -> list[str]:
    """What is wrong; it prints what it sees."""
    straight, stopped = folder / "straight", folder / "stopped"
    process = start(straight, steps, 0)
    points = curve(watch(process, straight, stopped, steps * 3 // 4))
    if process.code:
        return [f"exit code {process.code}: {process.text[-2000:]}"]
    problems = []
    for number, point in enumerate(points, start=1):
        shown = "  ".join(f"{p['MB']:7.1f} MB {p['threads']:3.0f} threads" for p in point)
        files = " ".join(f"{p['files']:.0f}" for p in point)
        print(f"after {number * (steps // INTERVALS):6} steps: {shown}  files {files}", flush=True)
    for name, ratio in growth(points).items():
        print(f"{name}: {ratio - 1:+.2%} from the second quarter to the last")
        if ratio > 1 + FLAT:
            problems.append(f"{name} grows: {ratio - 1:+.2%}")
    kept = sorted(path.name for path in straight.glob("[!.]*"))
    if len(kept) != 2 or kept[-1] != file(steps):
        problems.append(f"the folder holds {kept}")
    begun = newest(stopped)
    process = start(stopped, steps, 0)
    while newest(stopped) == begun and process.code is None:
        time.sleep(0.05)
    process.send(signal.SIGTERM)
    while process.code is None:
        time.sleep(0.05)
    at = newest(stopped)
    again = start(stopped, steps, 1)
    while again.code is None:
        time.sleep(0.05)
    print(f"a second training began after step {begun}, was stopped after step {at} and went on")
    if not begun < at < steps:
        problems.append(f"it was stopped after step {at} of {steps}")
    if again.code or digest(stopped / file(steps)) != digest(straight / file(steps)):
        problems.append(f"the resumed training is another: {again.text[-2000:]}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    chosen = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        problems = soak(Path(folder), chosen.steps)
    for problem in problems:
        print(problem)
    print(f"soak: {chosen.steps} steps, {'not ' * bool(problems)}flat, resumed and equal")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
