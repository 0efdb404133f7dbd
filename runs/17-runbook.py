# %% [markdown]
# # The operator's runbook
#
# A job that hangs: two of three ranks report the loss, the third goes on with the next step. What
# the flight recorder of each rank has kept leads to the line.

# %% name="setup"
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from book import provenance

provenance(device="cpu", world_size=3, backend="gloo")
print(f"torch {torch.__version__.partition('+')[0]}")
here = Path("runs") if Path("runs/book.py").exists() else Path()
dumps = Path(tempfile.mkdtemp(prefix="miniddp-")) / "dumps"


def run(*command: str) -> str:
    """What a command prints, without the folders of the paths."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    return re.sub(r"/\S+/(site-packages/|dist-packages/|(?=skip_a_call))", "", printed)


# %% name="hang"
launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
said = run(*launch, str(here / "skip_a_call.py"), str(dumps), "0", "2")
errors = sorted(line for line in said.splitlines() if line.startswith("rank "))
assert [line[:6] for line in errors] == ["rank 0", "rank 1", "rank 2"], said
assert any("Timed out" in line for line in errors)
gives_up = re.compile("Timed out|Connection closed by peer")  # the first closes its connections
assert all(gives_up.search(line) for line in errors), said
print("\n".join(errors))

# %% name="analysis"
analyser = "from torch.distributed.flight_recorder.fr_trace import main; main()"
said = run(sys.executable, "-c", analyser, str(dumps), "--prefix", "rank_")
lines = [line for line in said.splitlines() if "tabulate" not in line]
print("\n".join(lines))

# %% [markdown]
# The analysis takes the rank whose file it reads first for right, and calls those that differ from
# it culprits. Which file comes first is up to the file system.

# %% name="culprits"
named = {int(rank) for rank in re.findall(r"Culprit rank (\d)", said)}
assert named in ({1}, {0, 2}), named
assert "COLLECTIVE_TYPE_MISMATCH" in said

# %% name="last-calls"
said = run(sys.executable, str(here / "last_calls.py"), str(dumps))
calls = said.splitlines()
assert len(calls) == 6
assert "call 2: gloo:all_reduce [[4]]" in calls[3], "rank 1 is a call ahead"
assert all("report_loss" in calls[number] for number in (1, 5))
print(said)
