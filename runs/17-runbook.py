# %% [markdown]
# # The operator's runbook
#
# A job that hangs: two of three ranks report the loss, the third goes on with the next step. What
# the flight recorder of each rank has kept leads to the line.

# %% name="setup"
import re
import tempfile
import textwrap
from pathlib import Path

import torch

from book import provenance
from instruments.launchers import output_of
from instruments.programs import TORCHRUN, start_python

provenance(device="cpu", world_size=3, backend="gloo")
print(f"torch {torch.__version__.partition('+')[0]}")
dumps = Path(tempfile.mkdtemp(prefix="miniddp-")) / "dumps"


def run(*arguments: str) -> str:
    """What Python prints, without the folders of the paths."""
    printed = output_of(start_python(*arguments))
    return re.sub(r"/\S+/(site-packages/|dist-packages/|(?=skip_a_call))", "", printed)


# %% name="hang"
launch = [*TORCHRUN, "--standalone", "--nproc_per_node=3"]
said = run(*launch, "runs/skip_a_call.py", str(dumps), "0", "2")
errors = sorted(line for line in said.splitlines() if line.startswith("rank "))
assert [line[:6] for line in errors] == ["rank 0", "rank 1", "rank 2"], said
assert any("Timed out" in line for line in errors)
gives_up = re.compile("Timed out|Connection closed by peer")  # the first closes its connections
assert all(gives_up.search(line) for line in errors), said
print("\n".join(errors))

# %% [markdown]
# The analysis takes the rank whose file it reads first for right, and calls those that differ from
# it culprits. Which file comes first is up to the file system.

# %% name="analysis" ranks="3"
analyser = "from torch.distributed.flight_recorder.fr_trace import main; main()"
said = run("-c", analyser, str(dumps), "--prefix", "rank_")
culprits = {int(rank) for rank in re.findall(r"Culprit rank (\d)", said)}
assert culprits in ({1}, {0, 2}), culprits
assert "COLLECTIVE_TYPE_MISMATCH" in said
print("\n".join(line for line in said.splitlines() if "tabulate" not in line))

# %% name="last-calls" ranks="3"
said = run("runs/last_calls.py", str(dumps))
calls = said.splitlines()
assert len(calls) == 6
assert "call 2: gloo:all_reduce [[4]]" in calls[3], "rank 1 is a call ahead"
assert all("report_loss" in calls[number] for number in (1, 5))
print(said)

# %% [markdown]
# A rank that was killed has left no file.

# %% name="incomplete" ranks="3"
(dumps / "rank_1").unlink()
options = (str(dumps), "--prefix", "rank_")
refused = ""
try:
    run("-c", analyser, *options)
except RuntimeError as error:
    refused = str(error).splitlines()[-1]
assert "Missing dump files from ranks {1}" in refused
print(refused)
said = run("-c", analyser, *options, "--allow-incomplete-ranks")
assert "We cannot decide" in said
sentences = re.findall(r"We cannot decide .*? information\.", said)
print(textwrap.fill(sentences[0], 76))
