"""ZeRO through one step: what ranks hold and send is what instruments and miniddp say."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect
from tests.book.vis.test_interactive import CLICK_AND_COUNT, ROOT, SVG, compute, mount, page
from torch import nn

from instruments.memory import bytes_per_parameter, communication_elements, memory_per_rank
from miniddp import run_ranks
from miniddp.zero import FullyShardedModule

__all__ = ["compute", "page"]  # fixtures

RANKS, LAYERS, PARAMETERS = 4, 3, 12 * 10**6
STAGES = [0, 1, 2, 3]
OPTIONS = [{"prefetch": prefetch, "message": message}
           for prefetch in (False, True) for message in (0.5, 2)]  # fmt: skip

Operations = list[dict[str, Any]]


def plan(compute: Any, stage: int, **options: Any) -> tuple[Operations, list[float]]:
    operations = compute("zero-stepper", "plan", [[stage, options]])[0]
    return operations, compute("zero-stepper", "moments", [[operations]])[0]


def sizes(compute: Any, stage: int, operations: Operations, times: list[float]) -> list[Any]:
    holds = compute("zero-stepper", "held", [[stage, operations, time] for time in times])
    return compute("zero-stepper", "bytes", [[each] for each in holds])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_ends_with_the_memory_and_the_volume_of_its_stage(
    compute: Any, stage: int, options: dict[str, Any]
) -> None:
    operations, times = plan(compute, stage, **options)
    [ended] = sizes(compute, stage, operations, times[-1:])
    each = memory_per_rank(PARAMETERS, RANKS, stage, bytes_per_parameter("adam"))
    found = [ended[part] * PARAMETERS for part in ("parameters", "gradients", "optimizer", "total")]
    assert found == pytest.approx([each.parameters, each.gradients, each.optimizer, each.total])
    volume = compute("zero-stepper", "sent", [[operations, times[-1]]])[0]
    expected = communication_elements(PARAMETERS, RANKS, stage)
    assert volume * PARAMETERS * (RANKS - 1) / RANKS == pytest.approx(expected)


def test_the_order_is_that_of_real_ranks(compute: Any) -> None:
    operations, _ = plan(compute, 3)
    shown = [(each["kind"], each["layer"]) for each in sorted(operations, key=lambda o: o["end"])
             if each["kind"] in ("all-gather", "forward", "reduce-scatter")]  # fmt: skip
    assert run_ranks(events_of_a_step, RANKS) == [shown] * RANKS


def events_of_a_step(rank: int) -> list[tuple[str, int]]:
    events: list[tuple[str, int]] = []
    units = [
        FullyShardedModule(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) for _ in range(LAYERS)
    ]
    for number, unit in enumerate(units):
        note(unit, number, events)
    nn.Sequential(*units)(torch.ones(1, 8)).square().mean().backward()
    return events


def note(unit: FullyShardedModule, number: int, events: list[tuple[str, int]]) -> None:
    gather, reduce_scatter = unit.gather, unit.reduce_scatter
    unit.gather = lambda: events.append(("all-gather", number)) or gather()
    unit.reduce_scatter = lambda x: events.append(("reduce-scatter", number)) or reduce_scatter(x)
    unit.module.register_forward_hook(lambda *_: events.append(("forward", number)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_runs_before_what_it_needs(
    compute: Any, stage: int, options: dict[str, Any]
) -> None:
    operations, _ = plan(compute, stage, **options)
    for stream in ("compute", "link"):
        spans = [(each["start"], each["end"]) for each in operations if each["stream"] == stream]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    ends = {(each["kind"], each["layer"], each["pass"]): each["end"]
            for each in operations if each["layer"] is not None}  # fmt: skip
    starts = {(each["kind"], each["layer"], each["pass"]): each["start"]
              for each in operations}  # fmt: skip
    reduce = "reduce-scatter" if stage else "all-reduce"
    for layer in range(LAYERS):
        for way in ("forward", "backward") if stage == 3 else ():
            assert ends["all-gather", layer, way] <= starts[way, layer, None]
        assert ends["backward", layer, None] <= starts[reduce, layer, None]
        assert ends[reduce, layer, None] <= starts["update", None, None]


def waiting(compute: Any, operations: Operations) -> float:
    return sum(gap["end"] - gap["start"]
               for gap in compute("zero-stepper", "waits", [[operations]])[0])  # fmt: skip


@pytest.mark.parametrize("message", [0.5, 1, 3])
def test_prefetch_hides_gathers_and_needs_memory(compute: Any, message: float) -> None:
    alone, ahead = (plan(compute, 3, prefetch=on, message=message)[0] for on in (False, True))
    # Without prefetch compute waits for all messages but those that end under later compute: none.
    assert waiting(compute, alone) == pytest.approx(3 * LAYERS * message)
    assert waiting(compute, ahead) < waiting(compute, alone)
    if message <= 1:  # the first gather of each pass, and the last reduce-scatter, stay exposed
        assert waiting(compute, ahead) == pytest.approx(3 * message)
    peaks = compute("zero-stepper", "peak", [[3, alone], [3, ahead]])
    assert peaks[0] < peaks[1]


def test_at_most_one_layer_is_whole_without_prefetch_and_two_with_it(compute: Any) -> None:
    for prefetch, most in ((False, 1), (True, 2)):
        operations, times = plan(compute, 3, prefetch=prefetch)
        holds = compute("zero-stepper", "held", [[3, operations, time] for time in times])
        here = [sum(state != "part" for state in each["parameters"]) for each in holds]
        assert max(here) == most


def test_the_peaks_of_the_stages(compute: Any) -> None:
    """By hand: a layer is a third; ZeRO-3 has 4 + 4/3 gathered, and gradients 4/3 + 2 · 1/3."""
    plans = [[stage, plan(compute, stage)[0]] for stage in STAGES]
    peaks = compute("zero-stepper", "peak", plans)
    sharded = 1 + 4 / 3 + 2 + 4 / 3 + 2 / 3
    assert peaks == pytest.approx([16, 10, 4 + 2 + peak_gradients(2), sharded])


def peak_gradients(under_way: int) -> float:
    """ZeRO-2: two layers whole, the one computed and the one under way, a quarter of the third."""
    return 4 / LAYERS * (under_way + 1 / RANKS)


def test_it_goes_with_the_keyboard_and_says_what_happens(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    mount(page, "zero-stepper")
    says = page.locator(".says[role=status]")
    expect(says).to_contain_text("asks for the rest of layer 0")
    page.get_by_role("button", name="One moment forward").focus()
    page.keyboard.press("ArrowRight")
    expect(says).to_have_text("Layer 0 has arrived: whole on every rank.")
    assert page.evaluate("document.getAnimations().length") == 0
    assert page.locator(".gathered").count() == RANKS
    page.keyboard.press("End")
    expect(says).to_contain_text("The step is over.")
    expect(page.locator("dl")).to_contain_text("3 of 3 Ψ")
    expect(page.get_by_role("button", name="One moment forward")).to_be_disabled()
    page.get_by_role("radio", name="DDP").check(force=True)
    expect(page.locator("dl")).to_contain_text("0 of 2 Ψ")
    expect(page.get_by_role("radio", name="off")).to_be_disabled()
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.keyboard.press("Home")
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_quarters_fly_unless_motion_is_reduced(page: Page) -> None:
    mount(page, "zero-stepper")
    forward = page.get_by_role("button", name="One moment forward")
    assert forward.evaluate(CLICK_AND_COUNT) == RANKS * (RANKS - 1)


@pytest.mark.parametrize("method", ["DDP", "ZeRO-3"])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_nothing_is_cut(page: Page, width: int, method: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    mount(page, "zero-stepper")
    page.get_by_role("radio", name=method).check(force=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """() => [...document.querySelectorAll('.zero-stepper :is(td, th, dd, .pass)')]
        .filter(each => each.scrollWidth > each.clientWidth + 2).map(each => each.textContent)"""
    assert page.evaluate(outside) == []


def test_the_still_is_a_moment_of_it(compute: Any) -> None:
    root = ElementTree.parse(ROOT / "vis/zero-stepper.svg").getroot()
    operations, times = plan(compute, 3, prefetch=True)
    moment = int(root.get("data-moment", ""))
    holds = compute("zero-stepper", "held", [[3, operations, times[moment]]])[0]
    shown: dict[str, list[list[str]]] = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("data-states"):
            states = shown.setdefault(group.get("data-what", ""), [])
            states.append(group.get("data-states", "").split())
    assert shown == {what: [states] * RANKS for what, states in holds.items()}
    spans = [(each.get("data-name"), float(each.get("x", "0")), float(each.get("width", "0")))
             for each in root.iter(f"{SVG}rect") if each.get("data-name")]  # fmt: skip
    left, scale = spans[0][1], spans[0][2] / operations[0]["end"]
    expected = [
        (
            f"{each['kind']} {each['layer']}".removesuffix(" None"),
            left + scale * each["start"],
            scale * (each["end"] - each["start"]),
        )
        for each in operations
    ]
    for (name, x, width), (kind, start, duration) in zip(
        sorted(spans), sorted(expected), strict=True
    ):
        assert (name, x, width) == (
            kind,
            pytest.approx(start, abs=1),
            pytest.approx(duration, abs=1),
        )
