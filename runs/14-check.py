# %% [markdown]
# # The check
#
# `miniddp.check` watches the program of chapter 1, broken in the three ways of the first page, and
# the programs of its own tests.

# %% name="setup"
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from book import provenance, record, table

provenance(device="cpu", world_size=2, backend="gloo")
STAGE = Path("stages/1_average.py").read_text(encoding="utf-8")


def check(old: str, new: str) -> str:
    """What is said of the program in which `old` is changed."""
    assert STAGE.count(old) == 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "miniddp.check", "train.py"]
    environment = {**os.environ, "STEPS": "8", "PYTHONPATH": os.path.abspath("stages")}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(STAGE.replace(old, new), encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    begins = ("miniddp.check: ", "  where ", "  do ", "  read ")
    return "\n".join(line for line in done.stderr.splitlines() if line.startswith(begins))


# %% name="no-all-reduce"
said = check("        average_gradients(model)\n", "")
assert "each rank trains a model of its own" in said
print(said)

# %% name="other-weights"
said = check("torch.manual_seed(0)", "torch.manual_seed(rank)")
assert "the ranks begin with other weights" in said
print(said)

# %% name="a-rank-stops"
backward = "        loss.backward()\n"
said = check(backward, f"        if step == 4 and rank == 1:\n            break\n{backward}")
assert "rank 1 has ended" in said
print(said)

# %% name="programs"
command = [sys.executable, "-m", "tests.package.check.table"]
lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
programs = [line.split("\t") for line in lines]
others = [program for program in programs if program[2] != program[3]]
assert not others, others
wrong = [(found, name) for verdict, name, _, found in programs if verdict == "wrong"]
kinds = dict.fromkeys(found for found, _ in wrong)
rows = [(kind, "; ".join(name for found, name in wrong if found == kind)) for kind in kinds]
table(rows, ["found first", "wrong programs"])
record(wrong=len(wrong), right=len(programs) - len(wrong), kinds=len(kinds))
