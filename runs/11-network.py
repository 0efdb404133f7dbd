# %% [markdown]
# # The network, computed
#
# What `instruments.network` says of GPUs, beside what others measured. Nothing here was measured
# by the machine that ran it.

# %% name="setup"
import statistics

from book import provenance, record, table
from instruments import measurements, predictions
from instruments.cost import bus_bandwidth
from instruments.flops import peak_flops
from instruments.predictions import GIB, MIB, curve_of
from instruments.scaling import smallest_batch_per_rank

provenance(device="cpu", world_size=1, backend=None)

# %% [markdown]
# ## How large a batch hides the all-reduce
#
# The peak is NVIDIA's for one H100 SXM in bf16, without sparsity. Each GPU
# of a DGX H100 has 450 GB/s of NVLink in one direction. Its node has eight network cards of 400
# Gbit/s, and a ring for each of them. What a bucket of 25 MiB reaches of that, others measured.

# %% name="published"
PEAK = peak_flops("NVIDIA H100 80GB HBM3")
NVLINK, INFINIBAND = 450e9, 8 * 400e9 / 8


def bucket_bandwidth(setup: str) -> float:
    curve = curve_of(setup)
    seconds = curve.fit().all_reduce_seconds(25 * MIB)
    return bus_bandwidth(25 * MIB, seconds, curve.world_size)


LINKS = {
    "NVLink": NVLINK,
    "NVLink, 25 MiB": bucket_bandwidth("h100_8gpu"),
    "eight cards": INFINIBAND,
    "eight cards, 25 MiB": bucket_bandwidth("h100_16gpu_infiniband"),
}
rows = []
for name, bandwidth in LINKS.items():
    tokens = [smallest_batch_per_rank(part * PEAK, bandwidth) for part in (1, 0.4)]
    rows.append([name, f"{bandwidth / 1e9:.0f}", *(f"{count:,.0f}" for count in tokens)])
record(
    peak_tflops=PEAK / 1e12,
    nvlink_tokens=smallest_batch_per_rank(PEAK, NVLINK),
    infiniband_tokens=smallest_batch_per_rank(PEAK, INFINIBAND),
)
table(rows, ["link", "GB/s", "at peak", "at 40 %"], "lrrr")

# %% [markdown]
# ## All-reduces, trainings and a decay, predicted
#
# Each size of a published all-reduce is predicted twice: from the other sizes of its table, and
# from data sheets, where these say enough.

# %% name="network"
curves = predictions.curves()
rows, learned = [], []
for curve in curves:
    from_table, from_sheet = predictions.from_other_sizes(curve), predictions.from_hardware(curve)
    learned += [100 * abs(each.error) for size, each in from_table.items() if size >= MIB]
    if from_sheet:
        errors = [
            [100 * abs(each.error) for size, each in found.items() if first <= size < last]
            for found, first, last in (
                (from_table, MIB, 64 * GIB),
                (from_sheet, MIB, GIB),
                (from_sheet, GIB, 64 * GIB),
            )
        ]
        shown = [f"{statistics.median(each):.1f}" for each in errors]
        rows.append([curve.table.removeprefix("allreduce_"), curve.setup, *shown])
training = [100 * abs(each.error) for each in predictions.plain_training()]
record(
    all_reduces=sum(len(curve.seconds) for curve in curves),
    setups=len(curves),
    all_reduce_median=statistics.median(learned),
    all_reduce_worst=max(learned),
    trainings=len(training),
    training_worst=max(training),
    decay_error=100 * predictions.playbook()[-1].error,
)
table(rows, ["table", "set-up", "by table", "by sheet", "1 GiB up"], "llrrr")

# %% [markdown]
# ## Eight GPUs, slower than one
#
# Trainings of BERT-Large without overlap: a step is that of one GPU, and then an all-reduce that
# another table measured on the same hosts.

# %% name="slower"
MODEL, SLOW = "BERT-Large", "10GbE with TCP/IP"
table(
    [
        [
            each.setup.removeprefix(f"{MODEL}, ").split()[0],
            each.what.split()[0],
            f"{each.predicted:.0f}",
            f"{each.measured:.0f}",
            f"{100 * each.error:+.0f}",
        ]
        for each in predictions.plain_training()
        if each.setup.startswith(MODEL)
    ],
    ["link", "GPUs", "predicted", "measured", "error, %"],
    "lrrrr",
)
[alone] = [
    row
    for row in measurements.read("data_parallel_10gbe_100gb_32gpu")
    if (row["model"], row["link_between_nodes"], row["method"]) == (MODEL, SLOW, "BSP-A2A")
    and row["gpus"] == 1
]
gradient_bytes = 4 * predictions.GRADIENTS[MODEL]
slow_link = curve_of(predictions.LINKS[SLOW]).fit()
record(
    slower_gradients_mb=gradient_bytes / 1e6,
    slower_compute_s=alone["batch_per_gpu"] / alone["samples_per_s_total"],
    slower_message_s=slow_link.all_reduce_seconds(gradient_bytes, 8),
)
