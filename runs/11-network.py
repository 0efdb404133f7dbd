# %% [markdown]
# # The network, computed
#
# What `instruments.network` says of GPUs, beside what others measured. Nothing here was measured
# by the machine that ran it.

# %% name="setup"
import statistics
from collections.abc import Callable

import matplotlib.pyplot as plt

from book import LINE, MUTED, RANK_COLORS, figure, provenance, record, table
from instruments import h100, job, measurements, predictions, tensors
from instruments.cost import bus_bandwidth, ring_all_reduce_bytes
from instruments.job import EIGHT_CARDS, ONE_CARD, PEAK
from instruments.network import volume
from instruments.predictions import GIB, LINKS, TRAININGS, curve_of
from instruments.scaling import smallest_batch_per_rank
from miniddp.bucket import MIB

provenance(device="cpu", world_size=1, backend=None)

# %% [markdown]
# ## How large a batch hides the all-reduce
#
# The peak is NVIDIA's for one H100 SXM in bf16, without sparsity. Each GPU
# of a DGX H100 has 450 GB/s of NVLink in one direction. Its node has eight network cards of 400
# Gbit/s, and a ring for each of them. What a bucket of 25 MiB reaches of that, others measured.

# %% name="published" badge="computed"
NVLINK = 450e9
INFINIBAND = 8 * 400e9 / 8


def bucket_bandwidth(setup: str) -> float:
    curve = curve_of(setup)
    seconds = curve.link().all_reduce_seconds(25 * MIB)
    return bus_bandwidth(25 * MIB, seconds, curve.world_size)


BANDWIDTHS = {
    "NVLink": NVLINK,
    "NVLink, 25 MiB": bucket_bandwidth("h100_8gpu"),
    "eight cards": INFINIBAND,
    "eight cards, 25 MiB": bucket_bandwidth("h100_16gpu_infiniband"),
}
rows = []
for name, bandwidth in BANDWIDTHS.items():
    tokens = [smallest_batch_per_rank(part * PEAK, bandwidth) for part in (1, 0.4)]
    rows.append([name, f"{bandwidth / 1e9:.0f}", *(f"{count:,.0f}" for count in tokens)])
record(
    peak_tflops=PEAK / 1e12,
)
table(rows, ["link", "GB/s", "at peak", "at 40 %"], "lrrr")

# %% [markdown]
# ## All-reduces, trainings and a decay, predicted
#
# Each size of a published all-reduce is predicted twice: from the other sizes of its table, and
# from data sheets, where these say enough. InfiniBand nodes whose cards are not stated are taken
# for the DGX of the same GPU. One of them is none: later job files of its owner name four cards
# for nodes of A100, and its InfiniBand switches add (SHARP).
#
# Below 1 GiB data sheets do not say enough. With the size of the message NCCL changes protocol,
# algorithm and number of channels, and a cloud's plug-in may choose others. A table contains all
# that. But the prediction from it is an interpolation: the neighbours of what is left out are a
# factor of 4 apart. In half a table, with every other size, they are a factor of 16 apart.

# %% name="network" badge="computed"
learned = [
    found.percent
    for curve in predictions.curves()
    for size, found in predictions.from_other_sizes(curve).items()
    if size >= MIB
]
halves = predictions.half_tables()
sparse = [found.percent for half in halves for found in half]
trainings = predictions.plain_training()
record(
    all_reduces=len(learned),
    all_reduce_median=statistics.median(learned),
    all_reduce_worst=max(learned),
    half_median=statistics.median(sparse),
    half_worst=max(sparse),
    times_sheet_from_32_mib=predictions.times_promised(32 * MIB),
    times_sheet_from_1_mib=predictions.times_promised(MIB),
    trainings=len(trainings),
    training_worst=max(training.percent for training in trainings),
    decay_error=100 * predictions.playbook()[-1].error,
)

# %% [markdown]
# ## Eight GPUs, slower than one
#
# BERT-Large without overlap, as others measured it over two networks. A step of eight GPUs is that
# of one, and then an all-reduce, which another table measured on the same hosts. Each machine sends
# through one card.

# %% name="sum" badge="computed"
MODEL = "BERT-Large"
SLOW = "10GbE with TCP/IP"
FAST = "100GbIB with RDMA"
GPUS = 8
published = {
    (row["link_between_nodes"], row["gpus"]): row
    for row in measurements.read(TRAININGS)
    if row["model"] == MODEL and row["method"] == "BSP-A2A"
}
rates = {key: row["samples_per_s_total"] for key, row in published.items()}
alone = rates[SLOW, 1]
BATCH = published[SLOW, 1]["batch_per_gpu"]
CARD = {SLOW: 10e9 / 8, FAST: 100e9 / 8}  # bytes a second
gradient_bytes = 4 * predictions.GRADIENTS[MODEL]
sent = ring_all_reduce_bytes(gradient_bytes, GPUS)
compute = BATCH / alone
message = {
    name: curve_of(LINKS[name]).link().all_reduce_seconds(gradient_bytes, GPUS) for name in CARD
}


def for_both(text: str, value: Callable[[str], float]) -> list[str]:
    return [text, *(f"{value(name):.2f}" for name in CARD)]


guess = {name: GPUS * BATCH / (compute + message[name]) for name in CARD}
table(
    [
        for_both(f"one GPU computes: {BATCH} ÷ {alone:.0f}, s", lambda name: compute),
        for_both("its gradients, GB", lambda name: gradient_bytes / 1e9),
        for_both("a node sends 2 · 7/8 of that, GB", lambda name: sent / 1e9),
        for_both("its card would need, s", lambda name: sent / CARD[name]),
        for_both("the all-reduce, scaled from 32 GPUs, s", message.__getitem__),
        for_both("step: compute + all-reduce, s", lambda name: compute + message[name]),
        [
            f"samples a second: {GPUS} · {BATCH} ÷ step",
            *(f"{guess[name]:.0f}" for name in CARD),
        ],
        ["measured", *(f"{rates[name, GPUS]:.0f}" for name in CARD)],
    ],
    ["", "10 Gb/s", "100 Gb/s"],
    "lrr",
)

# %% name="sum-values" badge="computed"
record(
    inside_wait_s=4 * BATCH / rates[FAST, 4] - compute,
    between_wait_s=GPUS * BATCH / rates[FAST, GPUS] - compute,
)

# %% [markdown]
# ## Every training without overlap

# %% name="trainings" badge="computed"
MARKERS = {"ResNet-50": "o", "BERT-Base": "s", "BERT-Large": "^"}
fig, axes = plt.subplots(figsize=(4.6, 3.4))
for model, marker in MARKERS.items():
    for name, label in ((SLOW, "10 Gb/s"), (FAST, "100 Gb/s")):
        shown = [training for training in trainings if training.setup == f"{model}, {name}"]
        axes.plot(
            [training.measured for training in shown],
            [100 * training.measured / training.predicted for training in shown],
            marker,
            color=RANK_COLORS[list(MARKERS).index(model)],
            fillstyle="none" if name == SLOW else "full",
            label=f"{model}, {label}",
        )
axes.axhline(100, color=LINE, linewidth=1, zorder=0)
axes.set(xscale="log", ylim=(80, 110), xlabel="measured, samples/s")
axes.set_ylabel("measured, % of predicted")
fig.legend(loc="outside lower center", ncols=2)
figure(fig)

# %% [markdown]
# ## Two levels
#
# An all-reduce inside each node, one between nodes: four nodes of eight B200, 4 GiB, from data
# sheets, and measured.

# %% name="two-levels" badge="computed"
low, high = predictions.two_levels()
record(
    two_levels_inside_ms=1e3 * (high - low),
    two_levels_low_ms=1e3 * low,
    two_levels_high_ms=1e3 * high,
    two_levels_measured_ms=1e3 * curve_of("b200_32gpu").seconds[4 * GIB],
)

# %% [markdown]
# ## A job on two nodes
#
# The largest SmolLM2, of 1.7 billion parameters, with 4,096 tokens on each H100, which reaches 40 %
# of its peak. The nodes are DGX H100, with eight cards of 400 Gb/s, or have a single card of
# 100 Gb/s. What a rank needs, all gradients and activations counted, of an H100's 80 GB, and the
# same for Llama-3 8B:

# %% name="job-memory" badge="computed"
COLUMNS = {"SmolLM2-1.7B": tensors.SMOLLM2_1_7B, "Llama-3 8B": tensors.LLAMA_3_8B}
held = {
    name: job.memory(config, tensors.llama(name, config).elements)
    for name, config in COLUMNS.items()
}
needed = {name: sum(sizes.values()) for name, sizes in held.items()}
record(job_memory_gb=needed["SmolLM2-1.7B"] / 1e9)
table(
    [
        *(
            [what, *(f"{held[name][what] / 1e9:.1f}" for name in held)]
            for what in held["Llama-3 8B"]
        ),
        ["in all", *(f"{size / 1e9:.1f}" for size in needed.values())],
    ],
    ["GB on each rank", *COLUMNS],
    "lrr",
)
assert needed["SmolLM2-1.7B"] < 80e9 < needed["Llama-3 8B"], "one fits, the other does not"

# %% [markdown]
# DDP never divides a gradient, so these are the messages:

# %% name="job-buckets" badge="computed"
sizes = job.bucket_sizes()
table(
    [
        [
            f"{size / MIB:.2f}",
            sizes.count(size),
            f"{100 * size * sizes.count(size) / sum(sizes):.0f}",
        ]
        for size in sorted(set(sizes))
    ],
    ["MiB", "buckets", "of all bytes, %"],
    "rrr",
)

# %% name="job-buckets-values" badge="computed"
record(job_buckets=len(sizes), job_last_mib=sizes[-1] / MIB)

# %% [markdown]
# What a step takes on more and more GPUs.

# %% name="job-table" badge="computed"
JOBS = [
    ("one node", EIGHT_CARDS, [8]),
    ("eight cards", EIGHT_CARDS, [16, 64, 256]),
    ("one card", ONE_CARD, [16, 64, 256]),
]
jobs = {(name, gpus): job.step(gpus, nodes) for name, nodes, numbers in JOBS for gpus in numbers}
table(
    [
        [
            name,
            gpus,
            f"{1e3 * step.communication:,.0f}",
            f"{1e3 * step.seconds:,.0f}",
            f"{job.efficiency(step):.0f}",
            f"{job.hours(gpus, step):.1f}",
            f"{gpus * job.hours(gpus, step):,.0f}",
        ]
        for (name, gpus), step in jobs.items()
    ],
    ["between nodes", "GPUs", "messages, ms", "step, ms", "efficiency, %", "hours", "GPU-hours"],
    "lrrrrrr",
)

# %% name="job-hours" badge="computed"
GPUS_OF_JOB = [16, 32, 64, 128, 256]
one_node = job.hours(8, jobs["one node", 8])
fig, axes = plt.subplots(figsize=(5.2, 3.2))
for name, nodes, style in (("one card", ONE_CARD, "s--"), ("eight cards", EIGHT_CARDS, "o-")):
    times = [job.hours(gpus, job.step(gpus, nodes)) for gpus in GPUS_OF_JOB]
    axes.plot([8, *GPUS_OF_JOB], [one_node, *times], style, label=f"{name} between nodes")
halved = [one_node * 8 / gpus for gpus in (8, 256)]
axes.plot([8, 256], halved, ":", color=MUTED, label="half the hours for twice the GPUs")
axes.axhline(one_node, color=LINE, linewidth=1)
axes.annotate(
    "one node", (256, one_node), (0, 4), textcoords="offset points", ha="right", color=MUTED
)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set_xticks([8, *GPUS_OF_JOB], labels=[str(gpus) for gpus in (8, *GPUS_OF_JOB)])
axes.yaxis.set_major_formatter("{x:g}")
axes.set(xlabel="GPUs", ylabel="hours")
axes.legend()
figure(fig)

# %% name="job-values" badge="computed"
fast = jobs["eight cards", 16]
slow = jobs["one card", 16]
node = jobs["one node", 8]
measured = curve_of("h100_16gpu_infiniband").link()
measured_seconds = sum(map(measured.all_reduce_seconds, sizes))
backward = job.COMPUTE * 2 / 3
assert fast.communication < measured_seconds < backward, "backward hides measured ones too"
assert slow.seconds > 2 * node.seconds, "two nodes are slower than one"
record(
    job_billions=job.MODEL.elements / 1e9,
    job_tokens=job.TOKENS,
    job_data_billions=job.DATA / 1e9,
    job_reached=100 * job.REACHED,
    job_compute_ms=1e3 * job.COMPUTE,
    job_backward_ms=1e3 * backward,
    job_optimizer_ms=1e3 * job.OPTIMIZER,
    job_gradients_gb=job.GRADIENT_BYTES / 1e9,
    job_sheet_ms=1e3 * job.GRADIENT_BYTES * volume("ring", 16) / INFINIBAND,
    job_sheet_one_card_s=job.GRADIENT_BYTES * volume("ring", 16) / (100e9 / 8),
    job_messages_ms=1e3 * fast.communication,
    job_measured_ms=1e3 * measured_seconds,
    job_copies_ms=1e3 * sum(h100.COPIES) * job.GRADIENT_BYTES,
    job_stolen=100 * h100.STOLEN,
    job_step_ms=1e3 * fast.seconds,
    job_efficiency=job.efficiency(fast),
    job_efficiency_8=job.efficiency(node),
    job_efficiency_256=job.efficiency(jobs["eight cards", 256]),
    job_slow_messages_ms=1e3 * slow.communication,
    job_slower=slow.seconds / (2 * node.seconds),
)

# %% [markdown]
# ## What a step loses
#
# First the messages alone, then also the multiprocessors that NCCL's kernels take from compute,
# then also the copies into the buckets and back.

# %% name="job-losses" badge="computed"
rows = []
for name, nodes, numbers in JOBS:
    for gpus in numbers:
        lost = job.losses(gpus, nodes)
        rows.append([name, gpus, *(f"{1e3 * seconds:.1f}" for seconds in (*lost, sum(lost)))])
table(
    rows,
    ["between nodes", "GPUs", "messages, ms", "multiprocessors, ms", "copies, ms", "in all, ms"],
    "lrrrrr",
)

# %% name="job-losses-values" badge="computed"
lost_on_most = job.losses(256, EIGHT_CARDS)
record(
    lost_messages_16_ms=1e3 * job.losses(16, EIGHT_CARDS).messages,
    lost_messages_256_ms=1e3 * lost_on_most.messages,
    lost_copies_256_ms=1e3 * lost_on_most.copies,
)
assert lost_on_most.messages < sum(lost_on_most) / 2, "most is lost in the GPU"

# %% [markdown]
# ## One bucket, by hand
#
# The fastest algorithm's time is that of its hops (*latency*), that of the bytes at the narrowest
# place, and what it costs that pieces of the bucket wait for one another.

# %% name="bucket" badge="computed"
MOST_FREQUENT = statistics.mode(sizes)
by_hand = {
    (name, gpus): nodes.parts(MOST_FREQUENT, gpus)
    for name, nodes, numbers in JOBS
    for gpus in (numbers[0], numbers[-1])
}
table(
    [
        [name, gpus, *(f"{1e6 * part:,.0f}" for part in [*parts, sum(parts)])]
        for (name, gpus), parts in by_hand.items()
    ],
    ["between nodes", "GPUs", "latency, µs", "bytes, µs", "pieces wait, µs", "in all, µs"],
    "lrrrrr",
)
record(job_bucket_mib=MOST_FREQUENT / MIB)

# %% [markdown]
# ## What helps where the messages take too long

# %% name="remedies" badge="computed"
REMEDIES = {
    "as it is": {},
    "buckets of 100 MiB": {"cap": 100 * MIB},
    "gradients as views": {"views": True},
    "gradients in bf16": {"sent": 2},
    "accumulation of 4": {"batches": 4},
    "all four": {"cap": 100 * MIB, "views": True, "sent": 2, "batches": 4},
}
PLACES = {"16 GPUs, one card": (16, ONE_CARD), "256 GPUs, eight cards": (256, EIGHT_CARDS)}


helped = {
    (name, place): job.efficiency(job.step(*PLACES[place], **remedy))
    for name, remedy in REMEDIES.items()
    for place in PLACES
}
table(
    [[name, *(f"{helped[name, place]:.0f}" for place in PLACES)] for name in REMEDIES],
    ["efficiency, %", *PLACES],
    "lrr",
)
for place in PLACES:
    assert helped["all four", place] == max(helped[name, place] for name in REMEDIES)

# %% [markdown]
# ## Every point
#
# Measured, predicted from the other sizes of its table, and predicted from data sheets, as
# `python -m instruments.predictions` prints it.

# %% name="every-point" badge="computed"
print("\n".join(predictions.report()[0]).strip())
