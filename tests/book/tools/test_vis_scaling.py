"""The diagram of the steps over the ranks is drawn to scale, by the model of miniddp."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from instruments.cost import ring_all_reduce_bytes
from instruments.scaling import scaling_efficiency
from instruments.simulator import even_layers, simulate

PATH = Path(__file__).parents[3] / "vis" / "scaling-step.svg"
SVG = "{http://www.w3.org/2000/svg}"
RANKS, BUCKETS, MESSAGES_OF_TWO = (1, 2, 4, 8), 8, 60
PANELS = {"large": (80, 160), "quarter": (20, 40)}  # forward and backward
START = 62


def steps():
    """For each step of the model: its efficiency in percent, and where it ends."""
    for forward, backward in PANELS.values():
        for ranks in RANKS:
            layers = even_layers([MESSAGES_OF_TWO / BUCKETS] * BUCKETS, forward, backward)
            step = simulate(layers, lambda size, ranks=ranks: ring_all_reduce_bytes(size, ranks))
            efficiency = scaling_efficiency(step.compute, step.seconds)
            yield round(100 * efficiency), START + step.seconds


def drawn(kind):
    return [e for e in ElementTree.parse(PATH).iter() if e.get("class") == f"scaling-step-{kind}"]


def test_efficiencies_are_those_of_the_model():
    texts = ["".join(e.itertext()) for e in ElementTree.parse(PATH).iter(f"{SVG}text")]
    shown = [int(text.removesuffix(" %")) for text in texts if text.endswith(" %")]
    assert shown == [efficiency for efficiency, _ in steps()]
    desc = ElementTree.parse(PATH).find(f"{SVG}desc").text
    said = re.findall(r"([\d, and]+) percent", desc)
    assert [int(number) for part in said for number in re.findall(r"\d+", part)] == shown


def test_steps_end_where_the_model_says():
    ends = [float(re.match(r"M([\d.]+)", e.get("d"))[1]) for e in drawn("end")]
    assert ends == pytest.approx([end for _, end in steps()], abs=0.1)


def test_compute_has_the_length_of_the_model():
    widths = [float(e.get("width")) for e in drawn("work")]
    assert widths == [width for panel in PANELS.values() for width in panel * len(RANKS)]
