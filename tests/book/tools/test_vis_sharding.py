"""The diagrams of the chapter on sharding show what `miniddp.sampler` computes."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from miniddp.sampler import DistributedSampler, shard

VIS = Path(__file__).parents[3] / "vis"
SVG = "{http://www.w3.org/2000/svg}"


def samples_of_ranks(cells):
    samples = {0: [], 1: [], 2: []}
    for cell in cells:
        samples[int(cell.get("data-rank"))].append(int(cell.get("data-sample")))
    return list(samples.values())


def sampled(drop_last):
    samplers = [DistributedSampler(range(10), 3, rank, False, 0, drop_last) for rank in range(3)]
    return [list(sampler) for sampler in samplers]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("contiguous", [list(shard(10, 3, rank, contiguous=True)) for rank in range(3)]),
        ("strided", [list(shard(10, 3, rank)) for rank in range(3)]),
        ("padded", sampled(drop_last=False)),
        ("dropped", sampled(drop_last=True)),
    ],
)
def test_shards(row, expected):
    root = ElementTree.parse(VIS / "shards.svg").getroot()
    cells = root.findall(f".//{SVG}g[@data-row='{row}']/{SVG}g[@data-rank]")
    assert samples_of_ranks(cells) == expected


def test_uneven_steps():
    root = ElementTree.parse(VIS / "uneven-steps.svg").getroot()
    cells = root.findall(f"{SVG}g[@data-rank]")
    epochs = [[int(c.get("data-epoch")) for c in cells if c.get("data-rank") == r] for r in "012"]
    assert epochs == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    rest = [
        [0, 1, 2] * 2,
        [3, 4, 5] * 2,
        [6, 7, 8, 9, 6, 7],
    ]  # the last rank waits in its next step
    assert samples_of_ranks(cells) == rest
