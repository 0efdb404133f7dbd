# %% [markdown]
# # A long training
#
# 20,000 steps of the tiny model with `finetune`, on two ranks. `runs/soak.py` reads memory,
# open files and threads of both ranks while they train. A second training begins with a late
# checkpoint of the first, is stopped by SIGTERM, and the same command goes on. `make soak` does it
# again.

# %% name="setup"
import re
import subprocess
import sys

from book import provenance, record

provenance(device="cpu", world_size=2, backend="gloo")
STEPS = 20_000

# %% name="soak"
command = [sys.executable, "runs/soak.py", f"--steps={STEPS}"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stdout + done.stderr
lines = done.stdout.splitlines()
print("\n".join(line for line in lines if not line.startswith("after")))

# %% name="values"
growth = next(line for line in lines if line.startswith("MB:"))
record(steps=STEPS, memory_growth=float(re.findall(r"[-+][\d.]+", growth)[0]))
