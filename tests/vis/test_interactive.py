"""The moving diagrams compute what miniddp computes, and can be used by everyone.

Their scripts run in the browser of the tests, from files, without a site around them.
"""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from instruments.cost import (
    Link,
    hierarchical_all_reduce_seconds,
    ring_all_reduce_bytes,
    ring_all_reduce_seconds,
)
from instruments.memory import bytes_per_parameter, memory_per_rank
from instruments.scaling import scaling_efficiency
from instruments.simulator import COMMUNICATION, even_layers, simulate
from miniddp.bucket import plan_buckets
from miniddp.ring import all_gather_steps, reduce_scatter_steps
from miniddp.sampler import (
    DistributedSampler,
    epoch_order,
    equalise,
    shard,
)

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
ADDRESS = "http://book.test"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
MIB = 2**20

Compute = Callable[[str, str, Any], Any]


def serve(route: Route) -> None:
    path = ROOT / urlsplit(route.request.url).path.lstrip("/")
    if path.is_file():
        route.fulfill(body=path.read_bytes(), content_type=TYPES[path.suffix])
    else:
        route.fulfill(body="<!doctype html><title>Empty</title>", content_type="text/html")


@pytest.fixture(scope="module")
def compute(browser: Browser) -> Iterator[Compute]:
    """`compute(module, function, inputs)` calls an exported function once for each input."""
    page = browser.new_page()
    page.route(f"{ADDRESS}/**", serve)
    page.goto(ADDRESS)

    def call(module: str, function: str, inputs: list[list[Any]]) -> Any:
        return page.evaluate(
            "async ([module, name, inputs]) => { const found = await import(module);"
            " return inputs.map(input => found[name](...input)); }",
            [f"/vis/{module}.js", function, inputs],
        )

    yield call
    page.close()


# The ring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 9))
def test_every_rank_sends_the_chunks_that_the_ring_sends(compute: Compute, n: int) -> None:
    start, *moments = compute("ring-stepper", "states", [[n]])[0]
    ranks = range(n)
    assert start["held"] == [[[rank] for _ in ranks] for rank in ranks]
    assert start["transfers"] == []
    held = {(rank, chunk): {rank} for rank in ranks for chunk in ranks}
    plans = [
        ("reduce-scatter", [reduce_scatter_steps(rank, n) for rank in ranks]),
        ("all-gather", [all_gather_steps(rank, n) for rank in ranks]),
    ]
    steps = [(phase, [plan[rank][step] for rank in ranks])
             for phase, plan in plans for step in range(n - 1)]  # fmt: skip
    for moment, (phase, step) in zip(moments, steps, strict=True):
        assert moment["phase"] == phase
        assert moment["transfers"] == [
            {"from": rank, "to": (rank + 1) % n, "chunk": step[rank][0]} for rank in ranks
        ]
        travelling = [held[rank, step[rank][0]] for rank in ranks]
        for rank, chunks in enumerate(travelling):
            right, chunk = (rank + 1) % n, step[rank][0]
            assert chunk == step[right][1], "what one sends is what the next one waits for"
            kept = held[right, chunk] if phase == "reduce-scatter" else set()
            held[right, chunk] = kept | chunks
        assert moment["held"] == [[sorted(held[rank, chunk]) for chunk in ranks] for rank in ranks]
    assert all(everyone == set(ranks) for everyone in held.values())
    assert not any(flag for row in moments[-1]["stale"] for flag in row)


@pytest.mark.parametrize("n", range(2, 9))
def test_a_rank_sends_what_the_ring_counts(compute: Compute, n: int) -> None:
    steps = 2 * (n - 1)
    sent = compute("ring-stepper", "sentAfter", [[steps, n]])[0]
    assert sent == pytest.approx(ring_all_reduce_bytes(1, n))


def test_the_numbers_show_every_mistake(compute: Compute) -> None:
    """No two sums of a chunk's table are told apart by luck: rows and columns all differ."""
    places = [[rank, chunk] for rank in range(8) for chunk in range(8)]
    numbers = compute("ring-stepper", "numberOf", places)
    assert all(1 <= number <= 9 for number in numbers)
    rows = [tuple(numbers[8 * rank : 8 * rank + 8]) for rank in range(8)]
    assert len(set(rows)) == len(set(zip(*rows, strict=True))) == 8
    sums = compute("ring-stepper", "sumOf", [[list(range(8)), chunk] for chunk in range(8)])
    assert sums == [sum(row[chunk] for row in rows) for chunk in range(8)]


def test_the_still_of_the_ring_is_a_moment_of_it(compute: Compute) -> None:
    moment = compute("ring-stepper", "states", [[4]])[0][2]
    root = ElementTree.parse(ROOT / "vis/ring-stepper.svg").getroot()
    shown: dict[tuple[int, int], tuple[list[int], str]] = {}
    for cell in root.iter(f"{SVG}g"):
        if cell.get("data-rank"):
            letters = ["abcd".index(text.text or "") for text in cell.findall(f"{SVG}text")]
            frame = cell.find(f"{SVG}rect")
            assert frame is not None
            place = int(cell.get("data-rank", "")), int(cell.get("data-chunk", ""))
            shown[place] = letters, frame.get("class", "").rpartition("-")[2]
    arrived = {(move["to"], move["chunk"]) for move in moment["transfers"]}
    assert shown == {
        (rank, chunk): (
            moment["held"][rank][chunk],
            "new" if (rank, chunk) in arrived
            else "stale" if moment["stale"][rank][chunk] else "cell",
        )
        for rank in range(4)
        for chunk in range(4)
    }  # fmt: skip


# Shards --------------------------------------------------------------------------------------


def test_the_shuffle_is_that_of_torch(compute: Compute) -> None:
    lengths = [0, 1, 2, 3, 7, 40, 623, 624, 625, 1250, 5000]
    seeds = [0, 1, 2, 42, 99999, 2**31, 2**32 - 1, 2**32 + 3]
    inputs = [[length, seed] for length in lengths for seed in seeds]
    orders = compute("shard-explorer", "randperm", inputs)
    for (length, seed), order in zip(inputs, orders, strict=True):
        assert order == epoch_order(length, True, seed, 0), (length, seed)


def shard_inputs() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [
        {
            "length": draw.randint(1, 40),
            "worldSize": draw.randint(1, 8),
            "shuffle": draw.random() < 0.7,
            "seed": draw.choice([0, 1, draw.randint(0, 99999)]),
            "epoch": draw.randint(0, 5),
            "rest": draw.choice(["pad", "drop", "keep"]),
            "contiguous": draw.random() < 0.4,
        }
        for _ in range(400)
    ]


def indices_of(chosen: dict[str, Any], rank: int) -> list[int]:
    """The same choice by the functions of miniddp."""
    length, world_size = chosen["length"], chosen["worldSize"]
    order = epoch_order(length, chosen["shuffle"], chosen["seed"], chosen["epoch"])
    if chosen["rest"] != "keep":
        order = equalise(order, world_size, drop_last=chosen["rest"] == "drop")
    return [order[i] for i in shard(len(order), world_size, rank, chosen["contiguous"])]


def test_every_rank_reads_what_the_sampler_gives_it(compute: Compute) -> None:
    inputs = shard_inputs()
    compared = 0
    for chosen, found in zip(
        inputs, compute("shard-explorer", "shards", [[chosen] for chosen in inputs]), strict=True
    ):
        length, world_size = chosen["length"], chosen["worldSize"]
        shown = [[entry["sample"] for entry in mine] for mine in found["ranks"]]
        assert shown == [indices_of(chosen, rank) for rank in range(world_size)], chosen
        again = sum(entry["again"] for mine in found["ranks"] for entry in mine)
        assert again == max(0, sum(map(len, shown)) - length)
        assert len(found["dropped"]) == max(0, length - sum(map(len, shown)))
        if chosen["contiguous"] or (chosen["rest"] == "drop" and length < world_size):
            continue
        for rank in range(world_size):
            if chosen["rest"] == "keep":
                wanted = [found["order"][i] for i in shard(length, world_size, rank)]
            else:
                sampler = DistributedSampler(
                    range(length), world_size, rank, chosen["shuffle"], chosen["seed"],
                    drop_last=chosen["rest"] == "drop",
                )  # fmt: skip
                sampler.set_epoch(chosen["epoch"])
                wanted = list(sampler)
            assert shown[rank] == wanted, chosen
            compared += 1
    assert compared > 500


def test_the_program_under_the_explorer_gives_what_is_shown(compute: Compute) -> None:
    inputs = [chosen for chosen in shard_inputs() if chosen["length"] >= chosen["worldSize"]]
    programs = compute("shard-explorer", "program", [[chosen] for chosen in inputs])
    for chosen, program in zip(inputs, programs, strict=True):
        *statements, expression = program.split("\n")
        for rank in range(chosen["worldSize"]):
            names: dict[str, Any] = {
                "DistributedSampler": DistributedSampler, "epoch_order": epoch_order,
                "equalise": equalise, "shard": shard, "rank": rank,
            }  # fmt: skip
            exec("\n".join(statements), names)
            assert eval(expression, names) == indices_of(chosen, rank), program


def test_the_still_of_the_explorer_shows_what_the_sampler_gives() -> None:
    root = ElementTree.parse(ROOT / "vis/shard-explorer.svg").getroot()
    tiles = [(int(tile.get("data-rank", "")), int(tile.get("data-sample", "")))
             for tile in root.iter(f"{SVG}g") if tile.get("data-rank")]  # fmt: skip
    assert tiles == [(rank, sample) for rank in range(4)
                     for sample in DistributedSampler(range(10), 4, rank)]  # fmt: skip


# The timeline --------------------------------------------------------------------------------

READY, SECONDS, BACKWARD = [0.002, 0.005, 0.006, 0.012], [0.004, 0.001, 0.005, 0.003], 0.012
DONE = [0.006, 0.007, 0.012, 0.015]
EXPOSED = 0.003


def recorded_pass() -> dict[str, Any]:
    """What a timeline holds of a pass whose buckets travel one after the other."""
    end = BACKWARD + EXPOSED + 0.0005
    rank = {"end": end, "ready": READY, "launched": READY, "done": DONE}
    late = {name: [time + 0.002 for time in times] if isinstance(times, list) else times + 0.004
            for name, times in rank.items()}  # fmt: skip
    names = [["3.weight", "3.bias"], ["2.weight"], ["1.weight"], [f"0.{i}" for i in range(12)]]
    sizes = [1000, 2 * MIB, 3 * MIB, 25 * MIB]
    buckets = [{"bytes": size, "parameters": each} for size, each in zip(sizes, names, strict=True)]
    return {"step": 3, "buckets": buckets, "ranks": [rank, late]}


def test_a_pass_waits_as_long_as_the_simulation_says(compute: Compute) -> None:
    found = compute("bucket-timeline", "passOf", [[recorded_pass(), 0]])[0]
    assert found["computed"] == BACKWARD
    assert found["exposed"] == pytest.approx(EXPOSED + 0.0005)
    assert [row["from"] for row in found["rows"]] == [0, *READY[:-1]]
    apart = compute("bucket-timeline", "withoutOverlap", [[found]])[0]
    assert [row["done"] - row["launched"] for row in apart["rows"]] == pytest.approx(SECONDS)
    assert [row["launched"] for row in apart["rows"]] == pytest.approx([0.012, 0.016, 0.017, 0.022])
    assert apart["exposed"] == pytest.approx(sum(SECONDS) + 0.0005)


def test_buckets_that_are_done_out_of_order_take_no_negative_time(compute: Compute) -> None:
    timeline = recorded_pass()
    timeline["ranks"][0]["done"] = [0.009, 0.007, 0.011, 0.016]
    found = compute("bucket-timeline", "passOf", [[timeline, 0]])[0]
    apart = compute("bucket-timeline", "withoutOverlap", [[found]])[0]
    durations = [row["done"] - row["launched"] for row in apart["rows"]]
    assert durations == pytest.approx([0.007, 0, 0.002, 0.004])


@pytest.mark.parametrize("end", [0.3, 7.2, 12, 99, 4321])
def test_marks_of_an_axis_are_round_and_few(compute: Compute, end: float) -> None:
    step = compute("bucket-timeline", "tick", [[end, 6]])[0]
    assert 2 <= end / step <= 6
    assert re.fullmatch(r"[125]0*", f"{step:.12g}".replace("0.", "").lstrip("0"))


# The calculator ------------------------------------------------------------------------------


def calculator_inputs() -> list[dict[str, Any]]:
    draw = random.Random(1)
    found = []
    for _ in range(60):
        cap = draw.choice([0.5, 1, 5, 25, 200]) * MIB
        found.append(
            {
                "parameters": draw.choice([1, 1000, 25_600_000, 360_000_000]),
                "gradientBytes": draw.choice([2, 4]),
                "compute": draw.choice([0.0005, 0.05, 0.25, 4.0]),
                "accumulation": draw.choice([1, 2, 16]),
                "bucketCap": cap,
                "firstCap": min(cap, MIB),
                "ranksPerNode": draw.choice([1, 2, 4, 8]),
                "intra": {
                    "alpha": draw.choice([0, 1e-6, 1e-4]),
                    "beta": draw.choice([1e-9, 2e-11]),
                },
                "inter": {"alpha": draw.choice([5e-6, 1e-3]), "beta": draw.choice([1e-9, 2e-12])},
            }
        )
    return found


def bucket_sizes(total: int, cap: float, first: float) -> list[int]:
    """What miniddp.bucket plans for parameters so small that no bucket goes over its cap."""
    unit = 2**16
    sizes = [unit] * (total // unit) + ([total % unit] if total % unit else [])
    plan = plan_buckets(sizes, ["kind"] * len(sizes), range(len(sizes)), int(cap), int(first))
    return [sum(sizes[i] for i in bucket) for bucket in plan]


@pytest.mark.parametrize("total", [1, 2**16, MIB, MIB + 1, 51 * MIB, 51 * MIB + 5])
@pytest.mark.parametrize("cap", [0.5 * MIB, MIB, 25 * MIB])
def test_buckets_are_those_of_the_plan(compute: Compute, total: int, cap: float) -> None:
    first = min(cap, MIB)
    found = compute("scaling-calculator", "bucketBytes", [[total, cap, first]])[0]
    assert found == bucket_sizes(total, cap, first)


def test_a_step_takes_what_the_cost_model_says(compute: Compute) -> None:
    inputs = calculator_inputs()
    sizes = {n: compute("scaling-calculator", "worldSizes", [[n]])[0] for n in (1, 2, 4, 8)}
    assert sizes[4][:5] == [1, 2, 4, 8, 16]
    asked = [[each, n] for each in inputs for n in sizes[each["ranksPerNode"]]]
    for (each, n), found in zip(asked, compute("scaling-calculator", "step", asked), strict=True):
        per_node, intra, inter = each["ranksPerNode"], Link(**each["intra"]), each["inter"]
        shared = Link(inter["alpha"], inter["beta"] * per_node)
        buckets = found["sizes"]
        assert sum(buckets) == each["parameters"] * each["gradientBytes"]
        durations = [
            ring_all_reduce_seconds(size, n, intra) if n <= per_node
            else hierarchical_all_reduce_seconds(size, per_node, n // per_node, intra, shared)
            for size in buckets
        ]  # fmt: skip
        queue = iter(durations)
        sent = simulate(
            even_layers(buckets, each["compute"] / 3, each["compute"] * 2 / 3),
            lambda size, queue=queue: next(queue),
        )
        begin = each["compute"] / 3
        ends = [span.end - begin for span in sent.spans if span.stream == COMMUNICATION]
        compute_seconds = each["compute"] * each["accumulation"]
        close = lambda value: pytest.approx(value, rel=1e-9, abs=1e-12)  # noqa: E731
        assert found["communication"] == close(sum(durations))
        assert found["exposed"] == close(sent.exposed)
        assert found["ends"] == close(ends)
        assert found["seconds"] == close(compute_seconds + sent.exposed)
        efficiency = scaling_efficiency(compute_seconds, compute_seconds + sent.exposed)
        assert found["efficiency"] == close(efficiency)
        assert found["speedup"] == close(n * efficiency)


@pytest.mark.parametrize(("gradient_bytes", "precision"), [(4, "fp32"), (2, "mixed")])
def test_memory_is_that_of_the_stages(
    compute: Compute, gradient_bytes: int, precision: str
) -> None:
    each = compute("scaling-calculator", "bytesPerParameter", [[gradient_bytes]])[0]
    reference = bytes_per_parameter("adam", precision)
    assert each == vars(reference)
    asked = [[count, n, stage] for count in (1, 1000, 361_821_120) for n in (1, 3, 8, 1024)
             for stage in range(4)]  # fmt: skip
    found = compute("scaling-calculator", "memoryPerRank", [[*ask, each] for ask in asked])
    assert found == [vars(memory_per_rank(*ask, reference)) for ask in asked]


def test_compute_is_six_flops_per_parameter_and_token(compute: Compute) -> None:
    inputs = {"parameters": 360e6, "tokens": 8192, "peak": 989e12, "utilisation": 0.4}
    found = compute("scaling-calculator", "computeSeconds", [[inputs]])[0]
    assert found == pytest.approx(6 * 360e6 * 8192 / 989e12 / 0.4)


def test_the_still_of_the_calculator_shows_what_it_computes(page: Page) -> None:
    mount(page, "scaling-calculator")
    page.locator("details").first.locator("summary").click()
    rows = page.locator("details").first.locator("tbody tr")
    shown = {int(row.locator("th").inner_text()): row.locator("td").nth(3).inner_text()
             for row in rows.all()}  # fmt: skip
    root = ElementTree.parse(ROOT / "vis/scaling-calculator.svg").getroot()
    still = {int(dot.get("data-ranks", "")): float(dot.get("data-efficiency", ""))
             for dot in root.iter(f"{SVG}circle")}  # fmt: skip
    assert still.keys() == shown.keys()
    for ranks, efficiency in still.items():
        assert float(shown[ranks].removesuffix("\u00a0%")) == pytest.approx(
            100 * efficiency, abs=0.51
        )


# Numbers in words ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        ("seconds", 0, "0 s"), ("seconds", 0.00125, "1.25 ms"), ("seconds", 4e-7, "0.4 µs"),
        ("seconds", 0.2504, "250 ms"), ("seconds", 0.99999, "1 s"), ("seconds", 12.34, "12.3 s"),
        ("bytes", 999, "999 B"), ("bytes", 1500, "1.5 kB"), ("bytes", 1.44e9, "1.44 GB"),
        ("binaryBytes", 1572864, "1.5 MiB"), ("binaryBytes", 1023.9, "1 KiB"),
        ("percent", 0.861, "86 %"), ("percent", 0.994, "99.4 %"), ("percent", 0.0123, "1.2 %"),
    ],
)  # fmt: skip
def test_numbers_in_words(compute: Compute, function: str, value: float, text: str) -> None:
    assert compute("interactive", function, [[value]])[0] == text.replace(" ", "\u00a0")


# In a page -----------------------------------------------------------------------------------


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 800, "height": 900})
    context.set_default_timeout(5000)
    page = context.new_page()
    page.route(f"{ADDRESS}/**", serve)
    page.complaints = []  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.complaints.append(str(error)))  # type: ignore[attr-defined]
    yield page
    assert page.complaints == []  # type: ignore[attr-defined]
    context.close()


def markup(module: str, data: str | None = None) -> str:
    script = f'<script type="application/json">{data}</script>' if data else ""
    return (
        '<!doctype html><html lang="en"><title>Test</title>'
        '<link rel="stylesheet" href="/theme/book.css">'
        '<link rel="stylesheet" href="/vis/interactive.css">'
        f'<link rel="stylesheet" href="/vis/{module}.css"><main>'
        f'<div class="stage" data-module="{module}"><div class="still">A still</div>{script}</div>'
        f'<script type="module" src="/vis/{module}.js"></script></main>'
    )


def mount(page: Page, module: str, data: Any = None) -> None:
    page.goto(ADDRESS)
    page.set_content(markup(module, json.dumps(data) if data else None))
    expect(page.locator(".widget")).to_be_visible()
    expect(page.locator(".still")).to_have_count(0)


def test_bad_data_leaves_the_still(page: Page) -> None:
    page.goto(ADDRESS)
    page.set_content(markup("bucket-timeline", '{"ranks": []}'))
    while not page.complaints:  # type: ignore[attr-defined]
        page.wait_for_timeout(20)
    expect(page.locator(".still")).to_be_visible()
    page.complaints.clear()  # type: ignore[attr-defined]


def filled(page: Page, rank: int, chunk: int) -> str:
    cell = page.locator("tbody tr").nth(chunk).locator("td").nth(rank)
    return "".join(cell.locator("i.in").all_inner_texts())


def test_the_ring_is_stepped_with_the_keyboard(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    mount(page, "ring-stepper")
    slider = page.get_by_role("slider")
    assert slider.get_attribute("aria-valuetext") == "0 of 6"
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "3 of 6"
    assert [filled(page, rank, rank) for rank in range(4)] == ["abcd"] * 4
    page.keyboard.press("End")
    assert filled(page, 2, 0) == "abcd"
    expect(page.get_by_role("button", name="One step forward")).to_be_disabled()
    expect(page.locator(".sent")).to_contain_text("6\u00a0×\u00a0S/4 = 1.5\u00a0S")
    page.get_by_role("button", name="One step back").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowLeft")
    assert slider.get_attribute("aria-valuetext") == "4 of 6"
    page.keyboard.press("Home")
    assert filled(page, 2, 0) == "c"


def test_the_number_of_ranks_is_chosen_with_the_keyboard(page: Page) -> None:
    mount(page, "ring-stepper")
    page.get_by_role("radio", name="4").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="8")).to_be_checked()
    expect(page.locator("tbody tr")).to_have_count(8)
    assert page.get_by_role("slider").get_attribute("max") == "14"


def test_chunks_fly_unless_motion_is_reduced(page: Page) -> None:
    mount(page, "ring-stepper")
    forward = page.get_by_role("button", name="One step forward")
    forward.click()
    assert page.locator(".ghost").count() == 5, "one per rank, and the last one comes in again"
    assert filled(page, 2, 0) == "c", "the chunk has not landed"
    expect(page.locator(".ghost")).to_have_count(0)
    assert filled(page, 2, 0) == "bc"
    page.emulate_media(reduced_motion="reduce")
    forward.click()
    assert page.locator(".ghost").count() == 0
    assert page.evaluate("document.getAnimations().length") == 0
    assert filled(page, 3, 0) == "bcd"


def test_steps_may_come_faster_than_chunks_fly(page: Page) -> None:
    mount(page, "ring-stepper")
    page.evaluate(
        """() => { const forward = document.querySelector("[aria-label='One step forward']");
        for (let i = 0; i < 9; i += 1) forward.click(); }"""
    )
    expect(page.locator(".ghost")).to_have_count(0)
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "6 of 6"
    assert [filled(page, rank, 3 - rank) for rank in range(4)] == ["abcd"] * 4


def test_play_goes_to_the_end_and_pause_stops(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.clock.install()
    mount(page, "ring-stepper")
    slider = page.get_by_role("slider")
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(1700)
    page.get_by_role("button", name="Pause").click()
    stopped = slider.get_attribute("aria-valuetext")
    assert stopped == "2 of 6"
    page.clock.run_for(5000)
    assert slider.get_attribute("aria-valuetext") == stopped
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(12000)
    assert slider.get_attribute("aria-valuetext") == "6 of 6"
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_the_ring_s_sums_are_worked(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    mount(page, "ring-stepper")
    page.get_by_role("radio", name="numbers").check(force=True)
    page.get_by_role("button", name="One step forward").click()
    cell = page.locator("tbody tr").nth(0).locator("td").nth(2)
    own, arrived = map(int, cell.locator("small").inner_text().split("+"))
    assert int(cell.locator(".sum").inner_text()) == own + arrived


def test_the_explorer_follows_its_controls(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    mount(page, "shard-explorer")

    def shown() -> list[list[int]]:
        return [[int(tile) for tile in page.evaluate(
            "row => [...row.querySelectorAll('li')].map(tile => tile.firstChild.data)",
            row.element_handle())] for row in page.locator(".reader").all()]  # fmt: skip

    def sampled(length: int, ranks: int, epoch: int, **options: Any) -> list[list[int]]:
        found = []
        for rank in range(ranks):
            sampler = DistributedSampler(range(length), ranks, rank, **options)
            sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    assert shown() == sampled(10, 4, 0)
    assert page.locator(".reader .again").count() == 2
    page.get_by_role("button", name="Next epoch").click()
    assert shown() == sampled(10, 4, 1)
    page.get_by_label("Seed").fill("7")
    assert shown() == sampled(10, 4, 1, seed=7)
    page.get_by_label("Seed").fill("-1")
    assert shown() == sampled(10, 4, 1, seed=7), "what is not a seed changes nothing"
    page.get_by_role("radio", name="drop").check(force=True)
    assert shown() == sampled(10, 4, 1, seed=7, drop_last=True)
    assert page.locator(".strip .dropped").count() == 2
    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("radio", name="5").check(force=True)
    assert shown() == sampled(11, 5, 1, seed=7, drop_last=True)
    page.get_by_role("radio", name="as stored").check(force=True)
    expect(page.get_by_label("Seed")).to_be_disabled()
    assert shown() == sampled(11, 5, 1, shuffle=False, drop_last=True)
    page.get_by_role("radio", name="keep uneven").check(force=True)
    expect(page.locator(".says")).to_contain_text("2 or 3 samples")


def test_a_bucket_is_read_with_the_keyboard(page: Page) -> None:
    mount(page, "bucket-timeline", recorded_pass())
    buckets = page.locator("button.lane")
    assert buckets.count() == 4
    buckets.first.focus()
    page.keyboard.press("ArrowDown")
    expect(buckets.nth(1)).to_be_focused()
    expect(buckets.nth(1)).to_have_attribute("aria-pressed", "true")
    readout = page.locator(".readout")
    expect(readout).to_contain_text("Bucket 1: 1 parameter, 2\u00a0MiB")
    expect(readout).to_contain_text("2.weight")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(readout).to_contain_text("Bucket 3: 12 parameters, 25\u00a0MiB")
    expect(readout).to_contain_text("and 4 more")


def test_without_overlap_backward_waits_longer(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    mount(page, "bucket-timeline", recorded_pass())
    summary, waiting = page.locator(".summary"), page.locator(".over .waiting")
    wait = EXPOSED + 0.0005
    expect(summary).to_contain_text(f"then waits for {1000 * wait:.1f}\u00a0ms")
    width = waiting.evaluate("element => element.getBoundingClientRect().width")
    page.get_by_role("radio", name="after backward").check(force=True)
    expect(summary).to_contain_text("then waits for 13.5\u00a0ms")
    assert waiting.evaluate("element => element.getBoundingClientRect().width") > width
    page.get_by_role("radio", name="1").check(force=True)
    assert page.locator(".widget").evaluate("e => e.style.getPropertyValue('--rank')") == (
        "var(--rank-1)"
    )


def test_the_calculator_follows_its_controls(page: Page) -> None:
    mount(page, "scaling-calculator")
    result = page.locator(".results div")
    ranks = page.get_by_role("slider")
    ranks.focus()
    page.keyboard.press("Home")
    assert ranks.get_attribute("aria-valuetext") == "1"
    expect(result.nth(3)).to_contain_text("100.0\u00a0%")
    page.keyboard.press("ArrowRight")
    page.get_by_label("Bandwidth").first.fill("1")
    link = Link(10e-6, 1e-9)
    sizes = bucket_sizes(1_440_000_000, 25 * MIB, MIB)
    sent = sum(ring_all_reduce_seconds(size, 2, link) for size in sizes)
    expect(result.nth(1)).to_contain_text(f"{sent:.2f}\u00a0s")
    page.get_by_label("Bucket").fill("0.01")
    expect(page.get_by_role("alert")).to_contain_text("buckets: choose a larger one")
    page.get_by_label("Bucket").fill("25")
    page.get_by_role("radio", name="by FLOPs").check(force=True)
    expect(page.get_by_label("Tokens per micro-batch")).to_be_visible()
    expect(page.get_by_label("Compute per micro-batch")).to_be_hidden()


def test_the_calculator_starts_with_what_was_recorded(page: Page) -> None:
    values = {"parameters": 5_000_000, "gradient_bytes": 2, "compute_seconds": 0.08,
              "alpha": 5e-5, "beta": 4e-10}  # fmt: skip
    mount(page, "scaling-calculator", [{"kind": "cpu", "values": values}])
    assert page.get_by_label("Parameters").input_value() == "5"
    assert page.get_by_label("Bandwidth").first.input_value() == "2.5"
    assert page.get_by_label("Latency").first.input_value() == "50"
    assert page.get_by_label("Compute per micro-batch").input_value() == "80"
    expect(page.get_by_label("Preset").first).to_have_value("0")
    expect(page.locator("option").filter(has_text="as recorded (CPU)")).to_have_count(1)


DATA = {"bucket-timeline": recorded_pass()}


@pytest.mark.parametrize("width", [320, 360, 1280])
@pytest.mark.parametrize(
    "module", ["ring-stepper", "shard-explorer", "bucket-timeline", "scaling-calculator"]
)
def test_nothing_sticks_out(page: Page, module: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    mount(page, module, DATA.get(module))
    if module == "ring-stepper":
        page.get_by_role("radio", name="8").check(force=True)
        page.get_by_role("radio", name="numbers").check(force=True)
        page.get_by_role("slider").fill("6")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = """() => [...document.querySelectorAll(".widget :is(button, label, dd, small, p, .sum)")]
        .filter(e => getComputedStyle(e).display !== "inline" && !e.closest(".visually-hidden"))
        .filter(e => e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1)
        .map(e => e.outerHTML.slice(0, 120))"""
    assert page.evaluate(cut) == []
