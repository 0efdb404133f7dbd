# %% [markdown]
# # What the script to copy survives
#
# The runbook's `preemptible.py` with two ranks under `torchrun`, with one fault that is put in from
# outside, as in the run 13-faults: `instruments.copied_script` has the faults, and checks that at
# the end the checkpoint is bit for bit that of a script that nothing has disturbed.

# %% name="setup"
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from book import provenance, table

provenance(device="cpu", world_size=2, backend="gloo")

# %% name="survives"
with tempfile.TemporaryDirectory() as folder:
    found = Path(folder) / "found.json"
    command = ["runs/faults.py", "--program=script", "--repeat=20", "--seed=13"]
    done = subprocess.run(
        [sys.executable, *command, f"--json={found}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(found.read_text())["rows"]
table(
    [
        [
            row["kind"],
            f"{row['survived']} of {row['injected']}",
            row["most_steps_again"],
            row["what_happens"],
        ]
        for row in rows
    ],
    columns=["fault", "survived", "most steps done twice", "what happens"],
    align=["l", "r", "r", "l"],
)
print("600 steps, a save every 20")
