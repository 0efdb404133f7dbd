# %% [markdown]
# # What a failure costs, the restart included
#
# A formula, no measurement. One machine fails every 100 days, a checkpoint takes 30 seconds, and
# the job saves at Young's interval. A failure costs half an interval, and then what it takes until
# the ranks train again: to notice, to get the machines, to load.

# %% name="setup"
from book import provenance, record, table
from instruments.restarts import lost_share, save_interval

provenance(device="cpu", world_size=1, backend=None)

# %% name="cost" badge="computed"
MACHINE_SECONDS = 100 * 86_400
SAVE_SECONDS = 30
SLOW = 600 + 120 + 180  # NCCL's timeout, SLURM's queue, start and load
QUICK = 60 + 0 + 60  # a timeout of a minute, a spare machine, a load at once
rows = []
for machines in (1, 8, 64, 512, 2048):
    between = MACHINE_SECONDS / machines
    interval = save_interval(SAVE_SECONDS, between)
    steps = lost_share(interval, SAVE_SECONDS, between)
    shares = [steps, SLOW / between, QUICK / between]
    texts = [f"{100 * share:.1f} %" for share in shares]
    rows.append([machines, f"{between / 3600:,.0f} h", f"{interval / 60:.0f} min", *texts])
columns = ["machines", "a failure every", "save every", "saves and lost steps"]
table(rows, [*columns, "restarts of 15 min", "of 2 min"], align="rrrrrr")
record(slow_minutes=SLOW // 60, quick_minutes=QUICK // 60)
assert float(rows[3][4].split()[0]) > 5
