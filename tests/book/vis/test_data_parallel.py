"""Data parallel training in the page: four workers compute what four ranks of miniddp compute."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect
from tests.book.vis.test_interactive import ADDRESS, ROOT, SVG, compute, mount, page
from torch import nn

from miniddp import DistributedDataParallel, run_ranks

__all__ = ["compute", "page"]  # fixtures

RANKS, SAMPLES, STEPS = 4, 64, 20
APART = ["no all-reduce", "other starting weights", "own order of adding"]
FAULTS = ["nothing", *APART, "unequal parts", "a slow rank"]
HARMLESS = ["nothing", "own order of adding", "a slow rank"]


def heights(points: str | None) -> list[float]:
    """The second coordinate of each point of a line."""
    return [float(y) for y in re.findall(r",([\d.]+)", points or "")]


def network(weights: list[float]) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).double()
    values = torch.tensor(weights, dtype=torch.float64)
    nn.utils.vector_to_parameters(values, model.parameters())
    return model


def loss_of(model: nn.Module, samples: list[list[float]]) -> torch.Tensor:
    data = torch.tensor(samples, dtype=torch.float64)
    logits = model(data[:, :2]).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(logits, data[:, 2])


def train(rank: int, weights: list[float], parts: list[list[list[float]]]) -> list[float]:
    """What the page's rank does, with miniddp."""
    model = network(weights)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    for _ in range(STEPS):
        loss_of(ddp, parts[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.fixture(scope="module")
def start(compute: Any) -> tuple[list[list[float]], list[float]]:
    samples = compute("spirals", "spirals", [[SAMPLES]])[0]
    return samples, list(compute("spirals", "initialWeights", [[2]])[0])


def test_loss_and_gradient_are_torch_s(compute: Any, start: Any) -> None:
    samples, weights = start
    found = compute("spirals", "lossAndGradient", [[weights, samples]])[0]
    model = network(weights)
    loss = loss_of(model, samples)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert found["gradient"] == pytest.approx(gradient.tolist(), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("fault", ["none", "parts"])
def test_four_workers_train_as_four_ranks_of_miniddp(compute: Any, start: Any, fault: str) -> None:
    samples, weights = start
    shares = compute("spirals", "parts", [[samples, RANKS, fault == "parts"]])[0]
    assert sorted(itertools.chain(*shares)) == sorted(samples), "each sample belongs to one rank"
    options = {"ranks": RANKS, "samples": SAMPLES, "steps": STEPS, "fault": fault}
    found = compute.page.evaluate(
        "async options => (await import('/vis/data-parallel.js')).train(options)", options
    )
    assert all(found[str(rank)] == found["0"] for rank in range(RANKS)), "equal to the bit"
    expected = run_ranks(train, RANKS, weights, shares)[0]
    assert found["0"] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    alone = found["alone"] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert alone == (fault == "none"), "unequal parts train another model than one process"


def test_sums_in_an_own_order_part_by_a_rounding(compute: Any) -> None:
    options = {"ranks": RANKS, "samples": SAMPLES, "steps": STEPS, "fault": "order"}
    found = compute.page.evaluate(
        "async options => (await import('/vis/data-parallel.js')).train(options)", options
    )
    assert found["1"] != found["0"]
    assert found["1"] == pytest.approx(found["0"], abs=1e-12)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_page_says_what_became_of_the_replicas(page: Page, fault: str) -> None:
    page.set_default_timeout(120_000)
    mount(page, "data-parallel")
    page.get_by_role("radio", name=fault).check(force=True)
    page.get_by_role("button", name="Run").click()
    says = page.get_by_role("status")
    expect(says).to_contain_text("After 1,500 steps", timeout=120_000)
    expect(says).to_contain_text("differ by up to" if fault in APART else "equal to the bit")
    drawn = page.locator("polyline").evaluate_all("all => all.map(e => e.points.length)")
    assert drawn == [150] * 6
    example = heights(page.locator("path.example").first.get_attribute("d"))
    own = heights(page.locator("polyline.curve").first.get_attribute("points"))
    assert (example[1:] == pytest.approx(own[4::5], abs=0.2)) == (fault in HARMLESS)


def test_before_the_first_run_an_example_is_drawn(page: Page) -> None:
    mount(page, "data-parallel", {"fault": "parts"})
    expect(page.get_by_text("a run with nothing broken", exact=False).first).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("Predict what “unequal parts” does")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("text.label").first).to_be_hidden()
    expect(page.locator("path.example").first).to_be_visible()


def test_the_still_is_the_example(compute: Any) -> None:
    losses = compute.page.evaluate("async () => (await import('/vis/data-parallel.js')).EXAMPLE")
    root = ElementTree.parse(ROOT / "vis/data-parallel.svg").getroot()
    lines = [
        heights(path.get("d"))
        for path in root.iter(f"{SVG}path")
        if path.get("class") in ("data-parallel-alone", "data-parallel-ranks")
    ]
    drawn = [round(150 - 170 * loss) for loss in losses]
    assert [line for line in lines if line] == [drawn] * 5, "one process and four ranks"


def test_a_rank_that_stops_stops_the_others(page: Page) -> None:
    mount(page, "data-parallel", {"fault": "stop"})
    page.get_by_role("button", name="Run").click()
    says = page.get_by_role("status")
    expect(says).to_contain_text("Rank 3 stopped after step 400", timeout=60_000)
    page.get_by_role("button", name="Stop").click()
    expect(says).to_have_text("Stopped.")


def test_workers_that_cannot_be_started_are_said(page: Page) -> None:
    page.route(f"{ADDRESS}/vis/rank.js", lambda route: route.abort())
    mount(page, "data-parallel")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("starts no workers here")
