# %% [markdown]
# # One process and two ranks
#
# The same training, twice: one process with batches of 16 pairs, and two ranks with 8 pairs each.
# Both see the same joined batches. The loss curves must be the same up to rounding, and the
# throughput is measured with the communication inside.

# %% name="setup"
import logging

import matplotlib.pyplot as plt

import miniddp
from book import data_dir, figure, provenance, record, table
from miniddp.process import device
from miniddp.train import Options, Result, train

WORLD_SIZES = [1, 2]
JOINED_BATCH = 16
STEPS = 100
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")
folder = data_dir()


# %% name="train"
def run(rank: int, options: Options) -> Result:
    logging.disable()
    return train(options)


results = {}
for world_size in WORLD_SIZES:
    options = Options(
        data_dir=folder and str(folder),
        model="tiny",
        pretrained=False,
        steps=STEPS,
        batch_size=JOINED_BATCH // world_size,
    )
    results[world_size] = miniddp.run_ranks(run, world_size, options, timeout=600)[0]
one, two = results[1], results[2]
print(f"one process: loss {one.losses[0]:.4f} at first, {one.losses[-1]:.4f} at step {STEPS}")
print(f"two ranks:   loss {two.losses[0]:.4f} at first, {two.losses[-1]:.4f} at step {STEPS}")

# %% [markdown]
# ## The same loss curve

# %% name="loss-curve"
differences = [abs(a - b) for a, b in zip(one.losses, two.losses, strict=True)]
assert max(differences[:10]) < 1e-3, "the first steps differ by rounding only"
assert max(differences) < 0.05

fig, axes = plt.subplots()
axes.plot(one.losses, label=f"1 process, batches of {JOINED_BATCH}", linewidth=4, alpha=0.45)
axes.plot(two.losses, label=f"2 ranks, batches of {JOINED_BATCH // 2}", linewidth=1.5)
axes.set(xlabel="step", ylabel="mean loss of the joined batch")
axes.legend()
figure(fig)

# %% name="loss-values"
record(
    steps=STEPS,
    joined_batch=JOINED_BATCH,
    largest_difference_first_ten=max(differences[:10]),
    largest_difference=max(differences),
)

# %% [markdown]
# ## Throughput, with the communication in it

# %% name="throughput"
table(
    [
        [
            f"{ranks} {'process' if ranks == 1 else 'ranks'}",
            JOINED_BATCH // ranks,
            f"{result.samples_per_second:.1f}",
            f"{100 * result.sync_share:.1f} %",
            f"{result.accuracy:.3f}",
        ]
        for ranks, result in results.items()
    ],
    ["run", "pairs per rank", "pairs per second", "share of synchronisation", "test accuracy"],
)

# %% name="throughput-values"
record(
    samples_per_second_1=one.samples_per_second,
    samples_per_second_2=two.samples_per_second,
    speedup=two.samples_per_second / one.samples_per_second,
    sync_share_2=two.sync_share,
)
