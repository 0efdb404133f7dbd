# %% [markdown]
# # A long training
#
# 20,000 steps of the tiny model with `miniddp.train`, on two ranks. `runs/soak.py` reads memory,
# open files and threads of both ranks while they train. A second training begins with a late
# checkpoint of the first, is stopped by SIGTERM, and the same command goes on. `make soak` does it
# again.

# %% name="setup"
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from book import RANK_COLORS, figure, provenance, record

provenance(device="cpu", world_size=2, backend="gloo")
here = Path("runs") if Path("runs/book.py").exists() else Path()
STEPS = 20_000

# %% name="soak"
command = [sys.executable, str(here / "soak.py"), f"--steps={STEPS}"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stdout + done.stderr
lines = done.stdout.splitlines()
points = [re.findall(r"[\d.]+(?= steps| MB)", line) for line in lines if line.startswith("after")]
print("\n".join(line for line in lines if not line.startswith("after")))

# %% name="memory"
fig, axes = plt.subplots(figsize=(6.4, 2.8))
steps = [int(at) for at, *_ in points]
for rank, look in enumerate(("o-", "x--")):
    memory = [float(point[1 + rank]) for point in points]
    axes.plot(steps, memory, look, color=RANK_COLORS[rank], label=f"rank {rank}")
axes.margins(y=0.3)
axes.set(xlabel="steps", ylabel="resident memory, MB", ylim=(0, None))
axes.legend()
figure(fig)

# %% name="values"
growth = next(line for line in lines if line.startswith("MB:"))
record(steps=STEPS, memory_growth=float(re.findall(r"[-+][\d.]+", growth)[0]))
