"""Samples that move between ranks: the means are miniddp's, and the keyboard moves them."""

from __future__ import annotations

import itertools
import random
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
import torch.distributed as dist
from playwright.sync_api import Page, expect
from tests.book.vis.test_interactive import CLICK_AND_COUNT, ROOT, SVG, compute, mount, page

from miniddp import run_ranks
from miniddp.accumulation import global_mean, mean_weights

__all__ = ["compute", "page"]  # fixtures

Split = tuple[list[int], list[float]]


def draw_splits(ranks: int) -> list[Split]:
    """For each sample its rank, and its gradient. Every rank has at least one."""
    draw = random.Random(ranks)
    return [
        (
            [*range(ranks), *draw.choices(range(ranks), k=extra)],
            [draw.uniform(-9, 9) for _ in range(ranks + extra)],
        )
        for extra in range(25)
    ]


def by_miniddp(rank: int, splits: list[Split]) -> list[tuple[float, ...]]:
    """This rank's weight, and the plain, the weighted and the true mean, over real ranks."""
    found = []
    for owner, gradients in splits:
        mine = [value for value, who in zip(gradients, owner, strict=True) if who == rank]
        own = torch.tensor(mine, dtype=torch.float64)
        [weight] = mean_weights([len(mine)])
        sums = torch.stack([own.mean(), weight * own.mean()])
        dist.all_reduce(sums)
        plain, weighted = (sums / dist.get_world_size()).tolist()
        found.append((weight, plain, weighted, global_mean(own.sum(), len(mine)).item()))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_weights_and_means_are_those_of_ranks(compute: Any, ranks: int) -> None:
    splits = draw_splits(ranks)
    shown = compute("unequal-shards", "means", [[owner, ranks, values] for owner, values in splits])
    by_rank = run_ranks(by_miniddp, ranks, splits)
    for number, found in enumerate(shown):
        assert found["weights"] == pytest.approx([each[number][0] for each in by_rank])
        means = [found["plain"], found["weighted"], found["all"]]
        assert means == pytest.approx(by_rank[0][number][1:], abs=1e-12)
        assert found["weighted"] == pytest.approx(found["all"], abs=1e-12)


def owners(page: Page) -> list[list[int]]:
    return [[int(tile.inner_text()) for tile in lane.locator(".tile").all()]
            for lane in page.locator(".lane").all()]  # fmt: skip


def test_a_sample_moves_with_the_keyboard(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    mount(page, "unequal-shards")
    says = page.get_by_role("status")
    assert owners(page) == [[8, 2, 5], [5, 1, 3]]
    expect(says).to_contain_text("(5 + 3) / 2 = 4, as that of all")
    tile = page.get_by_role("button", name="gradient 5 on rank 1")
    tile.focus()
    page.keyboard.press("Enter")
    assert owners(page) == [[8, 2, 5, 5], [1, 3]]
    expect(says).to_contain_text("(5 + 2) / 2 = 3.5, but that of all samples is 4.")
    expect(says).to_contain_text("(1.33 · 5 + 0.67 · 2) / 2 = 4.")
    expect(page.locator(".plot .wrong")).to_have_text("plain: 3.5 ≠ 4")
    expect(page.locator(".plot .right")).to_have_text("weighted: 4 = 4")
    assert page.evaluate("document.getAnimations().length") == 0
    page.keyboard.press("ArrowDown")
    assert owners(page) == [[8, 2, 5], [5, 1, 3]], "the focus has gone with the sample"
    page.get_by_role("radio", name="3").check(force=True)
    assert owners(page) == [[8, 2], [5, 5], [1, 3]]
    page.get_by_role("button", name="gradient 8 on rank 0").focus()
    page.keyboard.press("ArrowUp")
    assert owners(page) == [[2], [5, 5], [8, 1, 3]]
    expect(says).to_contain_text("(2 + 5 + 4) / 3 = 3.67, but")


def test_unequal_counts_may_be_right_by_luck(compute: Any) -> None:
    found = compute("unequal-shards", "means", [[[0, 0, 0, 1, 0, 1], 2]])
    assert (found[0]["counts"], found[0]["plain"]) == ([4, 2], 4)
    assert "right by luck" in compute("unequal-shards", "verdict", [found])[0]


def test_a_rank_keeps_its_last_sample(page: Page) -> None:
    mount(page, "unequal-shards")
    for gradient in (8, 2, 5):
        page.get_by_role("button", name=f"gradient {gradient} on rank 0").click()
    assert owners(page) == [[5], [8, 2, 5, 1, 3]]
    expect(page.get_by_role("status")).to_contain_text("Rank 0 keeps its last sample")
    page.get_by_role("button", name="Deal").click()
    assert owners(page) == [[8, 2, 5], [5, 1, 3]]


def test_samples_fly_unless_motion_is_reduced(page: Page) -> None:
    mount(page, "unequal-shards")
    assert page.get_by_role("button", name="gradient 8").evaluate(CLICK_AND_COUNT) > 0


@pytest.mark.parametrize("ranks", ["2", "4"])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_nothing_is_cut(page: Page, width: int, ranks: str) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    mount(page, "unequal-shards")
    page.get_by_role("radio", name=ranks).check(force=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """() => [...document.querySelectorAll(".plot text")].filter(text => {
        const [a, b] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
        return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
    }).map(text => text.textContent)"""
    assert page.evaluate(outside) == []


def test_no_label_of_any_split_leaves_the_line(compute: Any) -> None:
    """The line of numbers ends at 9, and no mean can be beyond it."""
    splits = [list(owner) for owner in itertools.product(range(3), repeat=6)]
    complete = [owner for owner in splits if len(set(owner)) == 3]
    for found in compute("unequal-shards", "means", [[owner, 3] for owner in complete]):
        assert 0 < min(found["own"]) <= max(found["own"]) < 9
        assert found["weighted"] == pytest.approx(4)


def test_the_still_is_a_moment_of_it(compute: Any) -> None:
    root = ElementTree.parse(ROOT / "vis/unequal-shards.svg").getroot()
    places = {int(tile.get("data-sample", "")): int(tile.get("data-rank", ""))
              for tile in root.iter(f"{SVG}g") if tile.get("data-sample")}  # fmt: skip
    owner = [places[sample] for sample in sorted(places)]
    found = compute("unequal-shards", "means", [[owner, 2]])[0]
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    lanes = [f"mean {own:g}, weight {weight:.2f}"
             for own, weight in zip(found["own"], found["weights"], strict=True)]  # fmt: skip
    assert [text for text in texts if "weight " in text] == lanes
    results = [text for text in texts if re.search(" [=≠] ", text)]
    assert results == [f"plain: {found['plain']:g} ≠ {found['all']:g}",
                       f"weighted: {found['weighted']:g} = {found['all']:g}"]  # fmt: skip
