"""Trainings with overlap that others measured, each between two simulated bounds.

Three models on 8 to 32 GPUs over two networks, with a message per tensor during
backward (WFBP) and with merged messages (MG-WFBP; here buckets of 25 MiB). The time of
one GPU and a table of the link go in. What is unknown lies between the bounds: what
NCCL's kernels and the host's memory take of backward, and how long Horovod's ranks need
to agree on what to send.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from instruments.measurements import Row, read
from instruments.models import layers_by_bytes
from instruments.predictions import LINKS, TRAININGS, curve_of
from instruments.simulator import buckets, simulate

METHODS = {"WFBP-A2A": "per tensor", "MG-WFBP": "merged"}
"""How the messages of the methods that overlap travel."""

HIDES_NOTHING = 1.0
"""While a message travels, compute stands still."""

HIDES_ALL = 0.0
"""Messages cost no compute."""


@dataclass(frozen=True)
class Training:
    """Samples per second of all GPUs, measured and by the bounds."""

    model: str
    link: str
    gpus: int
    messages: str
    lowest: float
    measured: float
    highest: float

    @property
    def outside(self) -> float:
        """By which part the measured rate lies outside the bounds; 0 between them."""
        below = self.lowest / self.measured - 1
        above = self.measured / self.highest - 1
        return max(below, above, 0)

    @property
    def too_much(self) -> float:
        """By which part the better bound promises more than was measured."""
        return self.highest / self.measured - 1


def trainings() -> list[Training]:
    """Every training with overlap on several nodes whose link was measured."""
    rows = read(TRAININGS)
    on_one = {
        row["model"]: row["samples_per_s_total"] for row in rows if row["gpus"] == 1
    }
    found = []
    for row in rows:
        has_link = row["link_between_nodes"] in LINKS
        if row["method"] not in METHODS or row["gpus"] < 8 or not has_link:
            continue
        seconds = row["batch_per_gpu"] / on_one[row["model"]]
        found.append(
            Training(
                model=row["model"],
                link=row["link_between_nodes"],
                gpus=row["gpus"],
                messages=METHODS[row["method"]],
                lowest=samples_per_second(row, seconds, HIDES_NOTHING),
                measured=row["samples_per_s_total"],
                highest=samples_per_second(row, seconds, HIDES_ALL),
            )
        )
    return found


def samples_per_second(row: Row, compute: float, stolen: float) -> float:
    """Of a simulated training, whose GPUs compute for so many seconds in a step."""
    gpus = row["gpus"]
    link = curve_of(LINKS[row["link_between_nodes"]]).link()
    layers = layers_by_bytes(modules()[row["model"]], compute)
    plan = buckets(layers) if row["method"] == "MG-WFBP" else None

    def all_reduce(num_bytes: float) -> float:
        return link.all_reduce_seconds(num_bytes, gpus)

    step = simulate(layers, all_reduce, plan, stolen=stolen)
    return float(gpus * row["batch_per_gpu"] / step.seconds)


@cache
def modules() -> dict[str, nn.Module]:
    """The models of the table, without memory for their tensors."""
    import transformers

    bert: Any = transformers.BertForPreTraining
    resnet: Any = transformers.ResNetForImageClassification
    resnet_config: Any = transformers.ResNetConfig
    large = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    with torch.device("meta"):
        return {
            "ResNet-50": resnet(resnet_config(num_labels=1000)),
            "BERT-Base": bert(transformers.BertConfig()),
            "BERT-Large": bert(large),
        }
