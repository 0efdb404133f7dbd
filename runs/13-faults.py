# %% [markdown]
# # What survives what
#
# Trainings of two ranks under `torchrun`, each with one fault that is put in from outside: a signal
# at a random moment, a full disk, a damaged checkpoint. A training has survived if it goes on by
# itself, or refuses in a line that says why and goes on with the same command when that has been
# mended; and if its last checkpoint (weights, optimizer, random numbers, place in the data) is then
# bit for bit that of a training without a fault.
#
# `runs/faults.py` has the faults, `instruments.trials` checks the trainings.
# `make faults` runs the same with another seed.

# %% name="setup"
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path

from book import provenance, record, table
from miniddp.process import device

provenance(device=device(), world_size=2, backend="gloo")
REPEAT = 20  # of each fault for which the moment matters

# %% [markdown]
# ## The faults

# %% name="matrix"
with tempfile.TemporaryDirectory() as folder:
    found = Path(folder) / "found.json"
    command = [
        sys.executable,
        "runs/faults.py",
        "--program=trainer",
        f"--repeat={REPEAT}",
        "--seed=13",
    ]
    done = subprocess.run([*command, f"--json={found}"], capture_output=True, text=True)
    print(done.stdout.splitlines()[-1])
    lost = [line for line in done.stdout.splitlines() if line.startswith("LOST")]
    assert done.returncode == 0, "\n".join(lost) + done.stderr
    rows = json.loads(found.read_text())["rows"]

# %% [markdown]
# ## What happens


# %% name="survives"
def named_once(kinds: Sequence[str]) -> str:
    """Kinds of fault, with the words once with which all of them begin."""
    words = [kind.split() for kind in kinds]
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False))
    shared = len(list(alike)) if len(words) > 1 else 0
    return " ".join([*words[0][:shared], ", ".join(" ".join(rest[shared:]) for rest in words)])


groups = [list(group) for _, group in groupby(rows, key=itemgetter("what_happens"))]
table(
    [
        [
            named_once([row["kind"] for row in group]),
            f"{sum(row['survived'] for row in group)} of {sum(row['injected'] for row in group)}",
            max(row["most_steps_again"] for row in group),
            group[0]["what_happens"],
        ]
        for group in groups
    ],
    columns=["fault", "survived", "most steps done twice", "what happens"],
    align=["l", "r", "r", "l"],
)

# %% [markdown]
# How long it took until the job reacted, which is until its ranks were started again or it ended;
# the median. A machine with more to do takes longer.


# %% name="noticed"
def seconds(row: dict) -> str:
    found = row["seconds_until_noticed"]
    return "–" if found is None else f"{found:.1f}"


table(
    [[row["kind"], seconds(row)] for row in rows],
    columns=["fault", "seconds until noticed"],
    align=["l", "r"],
)

# %% name="values"
record(
    injected=sum(row["injected"] for row in rows),
    survived=sum(row["survived"] for row in rows),
    lost=sum(row["injected"] - row["survived"] for row in rows),
    orphans=sum(row["orphans"] for row in rows),
    left_over=sum(row["left_over"] for row in rows),
    kinds=len(rows),
    repeat=REPEAT,
    most_steps_again=max(row["most_steps_again"] for row in rows),
)
