"""The diagram of accumulation sends and averages what DDP sends and averages."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from playwright.sync_api import Page, expect
from tests.book.vis.test_interactive import CLICK_AND_COUNT, ROOT, SVG, compute, mount, page
from torch import Tensor, nn

from miniddp import DistributedDataParallel, run_ranks
from miniddp.hooks import allreduce_hook

__all__ = ["compute", "page"]  # fixtures

WAYS = ["every", "backward", "both", "first", "counter"]
MICRO_BATCHES, STEPS, BUCKETS = 4, 2, 2
TOTAL = STEPS * MICRO_BATCHES
Inside = dict[str, list[list[bool]]]
Found = list[tuple[int, list[int]]]


class Probe(nn.Module):
    """Micro-batch i gives place i of each parameter the gradient 1 on rank 0, 3 on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(MICRO_BATCHES) for _ in range(BUCKETS))

    def forward(self, i: int, rank: int) -> Tensor:
        return torch.stack([weight[i] * (1 + 2 * rank) for weight in self.weights]).sum()


def train(rank: int, inside: list[list[bool]], counting: bool) -> Found:
    """After each backward: the messages of the step so far, and the gradient."""
    model = Probe()
    ddp = model if counting else DistributedDataParallel(model, bucket_cap_mb=1e-6)
    sent: list[int] = []
    if counting:
        for parameter in model.parameters():
            count_to_four(parameter, sent)
    else:
        ddp.register_comm_hook(
            None, lambda _, bucket: sent.append(1) or allreduce_hook(None, bucket)
        )
        ddp(0, rank).backward()  # the first pass has one bucket
    found = []
    for i in range(TOTAL):
        if i % MICRO_BATCHES == 0:
            ddp.zero_grad()
            sent.clear()
        before, during = inside[i]
        with ddp.no_sync() if before else nullcontext():
            loss = ddp(i % MICRO_BATCHES, rank)
        with ddp.no_sync() if during else nullcontext():
            loss.backward()
        gradients = [weight.grad.tolist() for weight in model.weights]
        assert gradients[0] == gradients[1]
        found.append((len(sent), gradients[0][: i % MICRO_BATCHES + 1]))
    return found


def count_to_four(parameter: nn.Parameter, sent: list[int]) -> None:
    calls: list[int] = []

    def hook(parameter: Tensor) -> None:
        calls.append(1)
        if len(calls) == MICRO_BATCHES:
            sent.append(1)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    parameter.register_post_accumulate_grad_hook(hook)


def train_in_each_way(rank: int, inside: Inside) -> dict[str, Found]:
    return {way: train(rank, covered, way == "counter") for way, covered in inside.items()}


def test_messages_and_gradients_are_those_of_two_ranks(compute: Any) -> None:
    inside = {way: compute("accumulation", "inside", [[way, i] for i in range(TOTAL)])
              for way in WAYS}  # fmt: skip
    ranks = run_ranks(train_in_each_way, 2, inside)
    for way, shown in zip(
        WAYS, compute("accumulation", "moments", [[way] for way in WAYS]), strict=True
    ):
        after = [moment for moment in shown if moment["phase"] == "backward"]
        for rank, found in enumerate(ranks):
            assert [(moment["messages"], moment["grads"][rank]) for moment in after] == found[way]


def test_the_ways_differ_as_the_chapter_says(compute: Any) -> None:
    ends = {}
    for way in WAYS:
        steps = [moment for moment in compute("accumulation", "moments", [[way]])[0]
                 if moment["phase"] == "step"]  # fmt: skip
        alike = compute("accumulation", "agree", [[moment] for moment in steps])
        ends[way] = [(step["messages"], same) for step, same in zip(steps, alike, strict=True)]
    assert ends == {
        "every": [(8, True)] * 2,
        "backward": [(8, True)] * 2,
        "both": [(2, True)] * 2,
        "first": [(2, False)] * 2,
        "counter": [(2, True), (0, False)],
    }


def test_it_goes_with_the_keyboard_and_says_what_happens(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    mount(page, "accumulation")
    says = page.locator(".says[role=status]")
    expect(says).to_have_text("The optimizer. Both ranks take the same step, after 2 messages.")
    page.get_by_role("button", name="One moment forward").focus()
    page.keyboard.press("Home")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(page.locator("[data-micro-batch='0'] .grad")).to_have_text(["1", "3"])
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    expect(says).to_contain_text("Micro-batch 3, backward: both buckets leave")
    assert page.evaluate("document.getAnimations().length") == 0
    expect(page.locator("tr.now .grad").first).to_have_text("2222")
    page.keyboard.press("ArrowRight")
    expect(says).to_have_text("The optimizer. Both ranks take the same step, after 2 messages.")
    page.get_by_role("radio", name="backward of 0 to 2", exact=True).check(force=True)
    expect(says).to_contain_text("after 8 messages")
    page.get_by_role("radio", name="all of 1 to 3").check(force=True)
    expect(says).to_contain_text("drift apart")
    expect(page.locator("[data-micro-batch='3'] .grad").nth(1)).to_have_text("2333")
    page.get_by_role("button", name="One moment back").focus()
    page.keyboard.press("Home")
    expect(says).to_contain_text("Go forward")
    expect(page.get_by_role("button", name="One moment back")).to_be_disabled()


def test_the_means_meet_unless_motion_is_reduced(page: Page) -> None:
    mount(page, "accumulation")
    page.locator("input[type=range]").fill("7")
    forward = page.get_by_role("button", name="One moment forward")
    assert forward.evaluate(CLICK_AND_COUNT) == 8


@pytest.mark.parametrize("width", [320, 360, 1280])
def test_nothing_is_cut(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    mount(page, "accumulation")
    page.locator("input[type=range]").fill("18")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """() => [...document.querySelectorAll('.accumulation :is(td, th)')]
        .filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.textContent)"""
    assert page.evaluate(outside) == []


def test_the_still_is_a_moment_of_it(compute: Any) -> None:
    shown = [moment for moment in compute("accumulation", "moments", [["both"]])[0]
             if moment["phase"] == "backward"]  # fmt: skip
    root = ElementTree.parse(ROOT / "vis/accumulation.svg").getroot()
    rows = [row for row in root.iter(f"{SVG}g") if row.get("data-micro-batch")]
    for i, row in enumerate(rows):
        number, told, left, *values = [text.text for text in row.findall(f"{SVG}text")]
        covered = compute("accumulation", "inside", [["both", i]])[0]
        assert (number, told) == (str(i), "keep" if covered[0] else "send")
        assert left == ("⇄ 2" if compute("accumulation", "sends", [["both", i]])[0] else "silent")
        assert [int(value or "") for value in values] == [
            value for grad in shown[i]["grads"] for value in grad
        ]
    assert len(rows) == MICRO_BATCHES
