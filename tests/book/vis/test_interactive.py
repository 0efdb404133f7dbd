"""The moving diagrams compute what miniddp computes, and can be used by everyone.

Their scripts run in the browser of the tests, from files, without a site around them.
"""

from __future__ import annotations

import functools
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page, Route, expect

from finetune.model import build_model
from instruments import measurements
from instruments.cost import Link, ring_all_reduce_bytes
from instruments.flops import peak_flops
from instruments.memory import bytes_per_parameter, memory_per_rank
from instruments.network import ALGORITHMS, NODES, Network, fit_table, steps, volume
from instruments.simulator import Layer, buckets, even_layers, expected_maximum, simulate
from miniddp.bucket import plan_buckets
from miniddp.ring import all_gather_steps, reduce_scatter_steps
from miniddp.sampler import (
    DistributedSampler,
    epoch_order,
    equalise,
    shard,
)

ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"
# In one task, so that none has ended before it is counted, however busy the machine is.
CLICK_AND_COUNT = "button => { button.click(); return document.getAnimations().length; }"
ADDRESS = "http://book.test"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
MIB = 2**20

Compute = Any  # a callable of module, function and inputs, and its page


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

    call.page = page  # type: ignore[attr-defined]
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
    step = compute("interactive", "tick", [[end, 6]])[0]
    assert 2 <= end / step <= 6
    assert re.fullmatch(r"[125]0*", f"{step:.12g}".replace("0.", "").lstrip("0"))


# A step, and the link -------------------------------------------------------------------------


def some_layers(draw: random.Random) -> list[Layer]:
    return [
        Layer(draw.choice([0, 0.001, 0.02]), draw.choice([0, 0.002, 0.05]),
              [draw.randint(1, 40 * MIB) for _ in range(draw.randint(0, 4))])
        for _ in range(draw.randint(1, 9))
    ]  # fmt: skip


def in_javascript(layers: list[Layer]) -> list[dict[str, Any]]:
    return [{"forward": a, "backward": b, "gradients": sizes} for a, b, sizes in layers]


SIMULATE = """async cases => {
    const { buckets, simulate } = await import("/vis/simulator.js");
    return cases.map(({ layers, plan, alpha, beta, options }) =>
        simulate(layers, bytes => alpha + beta * bytes,
            plan && buckets(layers, ...plan), options));
}"""


def test_a_step_is_that_of_the_simulator(compute: Compute) -> None:
    draw = random.Random(3)
    cases = [
        {
            "layers": some_layers(draw),
            "plan": draw.choice([None, [MIB, MIB], [25 * MIB, MIB], [60 * MIB, 60 * MIB]]),
            "alpha": draw.choice([0, 1e-4]),
            "beta": draw.choice([1e-9, 1e-11]),
            "options": {
                "overlapped": draw.random() < 0.7,
                "microBatches": draw.choice([1, 1, 3]),
                "stolen": draw.choice([0, 0.2, 1]),
                "slowest": draw.choice([1, 1.3]),
            },
        }
        for _ in range(300)
    ]
    sent = [{**case, "layers": in_javascript(case["layers"])} for case in cases]
    for case, found in zip(cases, compute.page.evaluate(SIMULATE, sent), strict=True):
        layers, options = case["layers"], case["options"]
        step = simulate(
            layers,
            lambda size, case=case: case["alpha"] + case["beta"] * size,
            case["plan"] and buckets(layers, *case["plan"]),
            overlapped=options["overlapped"],
            micro_batches=options["microBatches"],
            stolen=options["stolen"],
            slowest=options["slowest"],
        )
        for name in ("seconds", "compute", "communication", "exposed"):
            assert found[name] == close(getattr(step, name)), case
        assert [(span["stream"], span["name"]) for span in found["spans"]] == [
            span[:2] for span in step.spans
        ]
        ends = [end for span in step.spans for end in span[2:]]
        assert [end for span in found["spans"] for end in (span["start"], span["end"])] == close(
            ends
        )


def close(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("count", [1, 8, 1000, 16384])
def test_the_slowest_rank_is_the_expected_maximum(compute: Compute, count: int) -> None:
    spread = 0.05
    found = compute("simulator", "slowestOf", [[count, spread]])[0]
    drawn = expected_maximum(
        lambda g, n: 1 - spread + spread * g.exponential(size=n), count, seed=2, trials=400
    )
    assert found == pytest.approx(drawn, abs=4 * spread * 1.29 / 400**0.5)


def test_the_layers_of_the_model_are_those_of_the_model(compute: Compute) -> None:
    found = compute("simulator", "llamaLayers", [["360m", 1.0, 2.0]])[0]
    with torch.device("meta"):
        model = build_model("360m")
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert [size for layer in found for size in layer["gradients"]] == sizes
    assert sum(layer["forward"] for layer in found) == pytest.approx(1)
    assert sum(layer["backward"] for layer in found) == pytest.approx(2)


def test_the_network_is_that_of_the_instruments(compute: Compute) -> None:
    draw = random.Random(4)

    def link() -> dict[str, float]:
        return {"alpha": draw.choice([0, 1e-6, 2e-5]), "beta": draw.choice([1e-9, 2e-11, 3e-12])}

    asked: list[list[Any]] = []
    for _ in range(200):
        node = draw.choice([1, 2, 4, 8])
        shape = {"ranksPerNode": node, "rails": draw.choice([1, 4, 8]), "inside": link(),
                 "rail": link(), "switch": draw.choice([None, link()])}  # fmt: skip
        asked.append([shape, draw.choice([0, 1000, 3e6, 1e9]), node * draw.choice([1, 2, 32])])
    found = compute("network", "allReduceSeconds", asked)
    for (shape, size, world_size), seconds in zip(asked, found, strict=True):
        network = Network(
            shape["ranksPerNode"], Link(**shape["inside"]), Link(**shape["rail"]), shape["rails"],
            shape["switch"] and Link(**shape["switch"]),
        )  # fmt: skip
        assert seconds == close(network.all_reduce_seconds(size, world_size))
    counted = [[name, n] for name in ALGORITHMS for n in (1, 2, 3, 8, 1024)]
    assert compute("network", "volume", counted) == [volume(*each) for each in counted]
    assert compute("network", "steps", counted) == [steps(*each) for each in counted]


# What others measured ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(compute: Compute) -> dict[str, Any]:
    found: dict[str, Any] = compute.page.evaluate("import('/vis/published.js').then(m => ({...m}))")
    return found


def test_published_numbers_are_those_of_the_tables(published: dict[str, Any]) -> None:
    for table, each in published["ALL_REDUCE"].items():
        assert each["source"][1] == measurements.sources()[table]["address"]
        rows = {(row["gpus"], row["size_bytes"], row["time_in_place_us"])
                for row in measurements.read(table)}  # fmt: skip
        assert {(each["ranks"], *point) for point in each["points"]} <= rows
        assert len(each["points"]) > 10
    assert published["SCALING"].keys() == {"ddp_scaling_bert_large_a100",
                                           "dp_scaling_ultrascale_playbook"}  # fmt: skip
    for table, each in published["SCALING"].items():
        assert each["source"][1] == measurements.sources()[table]["address"]
    playbook = measurements.read("dp_scaling_ultrascale_playbook")
    points = published["SCALING"]["dp_scaling_ultrascale_playbook"]["points"]
    assert points == [[row["gpus"], row["tokens_per_s_per_gpu"]] for row in playbook]
    points = published["SCALING"]["ddp_scaling_bert_large_a100"]["points"]
    assert points == [
        [row["gpus"], row["samples_per_s_total"]]
        for row in measurements.read("ddp_scaling_bert_large_a100")
        if (row["run"], row["precision"], row["sequence_length"]) == ("several nodes", "mixed", 128)
    ]


def test_a_measured_link_is_that_of_the_instruments(
    compute: Compute, published: dict[str, Any]
) -> None:
    for each in published["ALL_REDUCE"].values():
        points = [[size, 1e-6 * time] for size, time in each["points"]]
        table = fit_table(*zip(*points, strict=True), each["ranks"])
        sizes = [1000, 65536, 10**6, 25 * MIB, 2**30, 2**34]
        found = compute("network", "measuredSeconds", [[points, size] for size in sizes])
        assert found == close([table.all_reduce_seconds(size) for size in sizes])


def test_what_was_kept_of_the_speed(compute: Compute, published: dict[str, Any]) -> None:
    series = published["SCALING"]
    found = compute("scaling-calculator", "keptSpeed", [[each] for each in series.values()])
    kept = dict(zip(series, found, strict=True))
    assert kept["dp_scaling_ultrascale_playbook"][-1] == [256, close(15700.38 / 40149.94)]
    assert kept["ddp_scaling_bert_large_a100"][-1] == [256, close(138294 / 32 / 4553)]


# The tuner -----------------------------------------------------------------------------------


def test_the_tuner_shows_the_simulator_s_step(compute: Compute, published: dict[str, Any]) -> None:
    table = published["ALL_REDUCE"]["allreduce_h100_8gpu"]
    measured = fit_table([size for size, _ in table["points"]],
                         [1e-6 * time for _, time in table["points"]], 8)  # fmt: skip
    own = {"measured": "", "alpha": 2e-4, "bandwidth": 5e9, "backward": 0.2}
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"measured": "allreduce_h100_8gpu", "backward": 0.03}, measured.all_reduce_seconds),
        (own, lambda size: 2e-4 + size / 5e9),
    ]
    [given] = compute("simulator", "llamaLayers", [["360m", 1.0, 2.0]])
    for inputs, all_reduce in cases:
        scale = inputs["backward"] / 2
        layers = [Layer(scale * each["forward"], scale * each["backward"], each["gradients"])
                  for each in given]  # fmt: skip
        caps = [0.25, 25, 400]
        for cap, found in zip(
            caps, compute("bucket-tuner", "tuned", [[inputs, cap] for cap in caps]), strict=True
        ):
            plan = buckets(layers, int(cap * MIB), MIB if cap == 25 else int(cap * MIB))
            step = simulate(layers, all_reduce, plan)
            assert found["buckets"] == len(plan)
            assert found["exposed"] == close(step.exposed)
            assert found["seconds"] == close(step.seconds)


def test_the_still_of_the_tuner_shows_what_it_computes(compute: Compute) -> None:
    root = ElementTree.parse(ROOT / "vis" / "bucket-tuner.svg").getroot()
    still = {float(dot.get("data-cap", "")): float(dot.get("data-exposed", ""))
             for dot in root.iter() if dot.get("data-cap")}  # fmt: skip
    inputs = {"measured": "allreduce_h100_8gpu", "backward": 0.03}
    steps = compute("bucket-tuner", "tuned", [[inputs, cap] for cap in still])
    assert len(still) == 14
    for exposed, step in zip(still.values(), steps, strict=True):
        assert exposed == pytest.approx(1000 * step["exposed"], abs=0.001)
    bars = [part for part in root.iter() if part.get("class") == "bucket-tuner-bar"]
    assert len(bars) == steps[list(still).index(25)]["buckets"]


# The calculator ------------------------------------------------------------------------------


def calculator_inputs() -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [
        {
            "ranks": 1,
            "node": draw.choice([1, 2, 4, 8]),
            "parameters": draw.choice([0.001, 25.6, 361.8]),
            "gradient": draw.choice([2, 4]),
            "tokens": draw.choice([512, 8192]),
            "batches": draw.choice([1, 2, 16]),
            "peak": 989.5,
            "reached": draw.choice([20, 40]),
            "time": draw.choice([0, 0.5, 250]),
            "bucket": draw.choice([1, 5, 25, 200]),
            "inside": draw.choice([51, 360]),
            "switch": draw.choice([0, 300]),
            "hop": draw.choice([0, 3.4]),
            "card": draw.choice([1.19, 47.5]),
            "cards": draw.choice([1, 8]),
            "wire": 14,
            "spread": draw.choice([0, 2]),
            "stolen": draw.choice([0, 15]),
        }
        for _ in range(40)
    ]


@functools.cache
def bucket_sizes(total: int, cap: float, first: float) -> list[int]:
    """What miniddp.bucket plans for parameters of which every cap is a multiple."""
    unit = int(min(cap, first))
    sizes = [unit] * (total // unit) + ([total % unit] if total % unit else [])
    plan = plan_buckets(sizes, ["kind"] * len(sizes), range(len(sizes)), int(cap), int(first))
    return [sum(sizes[i] for i in bucket) for bucket in plan]


@pytest.mark.parametrize("total", [1, 2**16, MIB, MIB + 1, 51 * MIB, 51 * MIB + 5])
@pytest.mark.parametrize("cap", [0.5 * MIB, MIB, 25 * MIB])
def test_buckets_are_those_of_the_plan(compute: Compute, total: int, cap: float) -> None:
    first = min(cap, MIB)
    found = compute("scaling-calculator", "bucketBytes", [[total, cap, first]])[0]
    assert found == bucket_sizes(total, cap, first)


def test_the_calculator_opens_on_an_h100_node(compute: Compute) -> None:
    defaults = compute("scaling-calculator", "readAddress", [[""]])[0]["inputs"]
    found = compute("scaling-calculator", "networkOf", [[defaults]])[0]
    node = NODES["DGX H100"]
    links = {name: vars(getattr(node, name)) for name in ("inside", "rail", "switch")}
    assert {name: found[name] for name in links} == {
        name: {key: close(value) for key, value in link.items()} for name, link in links.items()
    }
    assert (found["ranksPerNode"], found["rails"]) == (node.ranks_per_node, node.rails)
    assert 1e12 * defaults["peak"] == peak_flops("NVIDIA H100 80GB HBM3")


def test_a_step_takes_what_simulator_and_network_say(compute: Compute) -> None:
    inputs = calculator_inputs()
    sizes = {n: compute("scaling-calculator", "worldSizes", [[n]])[0] for n in (1, 2, 4, 8)}
    assert sizes[4][:5] == [1, 2, 4, 8, 16]
    assert sizes[8][-1] == 16384
    asked = [[each, n] for each in inputs for n in sizes[each["node"]][::3]]
    for (each, n), found in zip(asked, compute("scaling-calculator", "step", asked), strict=True):
        network = Network(
            each["node"], Link(1e-6 * each["hop"], 1e-9 / each["inside"]),
            Link(1e-6 * each["wire"], 1e-9 / each["card"]), each["cards"],
            Link(3.4e-6, 1e-9 / each["switch"]) if each["switch"] else None,
        )  # fmt: skip
        cap = each["bucket"] * MIB
        total = round(each["parameters"] * 10**6) * each["gradient"]
        assert found["sizes"] == bucket_sizes(total, cap, MIB if each["bucket"] == 25 else cap)
        compute_seconds = (
            each["time"] / 1000
            or 6 * each["parameters"] * 1e6 * each["tokens"] / (each["peak"] * 1e10)
            / each["reached"]
        )  # fmt: skip
        harmonic = sum(1 / i for i in range(1, n + 1))
        layers = even_layers(found["sizes"], compute_seconds / 3, compute_seconds * 2 / 3)
        last = simulate(
            layers,
            lambda size, network=network, n=n: network.all_reduce_seconds(size, n),
            stolen=each["stolen"] / 100,
            slowest=1 + each["spread"] / 100 * (harmonic - 1),
        )
        earlier = (each["batches"] - 1) * last.compute * (1 + each["spread"] / 100 * (harmonic - 1))
        alone = each["batches"] * compute_seconds
        assert found["communication"] == close(last.communication)
        assert found["seconds"] == close(earlier + last.seconds)
        assert found["efficiency"] == close(alone / (earlier + last.seconds))
        assert found["speedup"] == close(n * alone / (earlier + last.seconds))
        assert found["tokensPerSecond"] == close(
            n * each["batches"] * each["tokens"] / (earlier + last.seconds)
        )


# The address ---------------------------------------------------------------------------------


def test_an_address_gives_back_what_it_was_written_from(compute: Compute) -> None:
    defaults = compute("scaling-calculator", "readAddress", [[""]])[0]
    assert defaults["problem"] is None
    chosen = {**defaults["inputs"], "ranks": 64, "parameters": 1700.5, "gradient": 2, "time": 1e-6}
    address = compute("scaling-calculator", "writeAddress", [[chosen]])[0]
    assert address == "?sizing=ranks:64,parameters:1700.5,gradient:2,time:0.000001"
    assert compute("scaling-calculator", "readAddress", [[address]])[0] == {
        "inputs": chosen,
        "problem": None,
    }
    searched = compute("scaling-calculator", "readAddress", [["?q=buckets"]])[0]
    assert searched == defaults, "what is not about the calculator is nobody's mistake"


NONSENSE = {
    "ranks:abc": "The address has ranks:abc, expected a whole number from 1 to 16384.",
    "ranks:7": "The address has ranks:7, expected a power of 2.",
    "ranks:2.5": "expected a whole number from 1 to 16384.",
    "ranks:99999999": "expected a whole number from 1 to 16384.",
    "node:3": "The address has node:3, expected one of 1, 2, 4, 8.",
    "node:8,ranks": "The address has ranks:, expected a whole number",
    "parameters:-1": "expected a number from 0.001 to 1000000.",
    "parameters:1e999": "expected a number from 0.001 to 1000000.",
    "parameters:0x10": "expected a number",
    "tokens:1:2": "The address has tokens:1:2, expected",
    "constructor:1": "The address has “constructor”, which is none of ranks, node,",
    "<img src=x onerror=alert(1)>:1": "The address has “<img src=x onerror=alert(1)>”",
    "x" * 5000: f"The address has “{'x' * 40}…”",
}


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_in_the_address_gives_a_line_and_the_defaults(compute: Compute, text: str) -> None:
    defaults = compute("scaling-calculator", "readAddress", [[""]])[0]["inputs"]
    found = compute("scaling-calculator", "readAddress", [[f"?sizing={quote(text)}"]])[0]
    assert NONSENSE[text] in found["problem"]
    assert found["problem"].endswith("These are the defaults.")
    assert "\n" not in found["problem"]
    assert len(found["problem"]) < 300
    assert found["inputs"] == defaults


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_address_breaks_the_calculator(compute: Compute, text: str) -> None:
    found = compute("scaling-calculator", "readAddress", [[f"?sizing={quote(text, safe=':,')}"]])[0]
    assert found["problem"] is None or len(found["problem"]) < 300
    assert compute("scaling-calculator", "step", [[found["inputs"], found["inputs"]["ranks"]]])


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


def test_the_still_of_the_calculator_shows_what_it_computes(page: Page) -> None:
    mount(page, "scaling-calculator")
    details = page.locator(".outputs details").first
    details.locator("summary").click()
    rows = details.locator("tbody tr")
    shown = {int(row.locator("th").inner_text().replace(",", "")):
             row.locator("td").nth(3).inner_text() for row in rows.all()}  # fmt: skip
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


def mount(page: Page, module: str, data: Any = None, query: str = "") -> None:
    page.goto(f"{ADDRESS}/{query}")
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
    again = page.locator(".order .again").first
    expect(again).to_have_css("overflow", "visible")  # its badge lies on the corner
    page.get_by_role("button", name="Next epoch").click()
    assert shown() == sampled(10, 4, 1)
    page.get_by_label("Seed").fill("7")
    assert shown() == sampled(10, 4, 1, seed=7)
    page.get_by_label("Seed").fill("-1")
    assert shown() == sampled(10, 4, 1, seed=7), "what is not a seed changes nothing"
    page.get_by_role("radio", name="drop").check(force=True)
    assert shown() == sampled(10, 4, 1, seed=7, drop_last=True)
    assert page.locator(".order .dropped").count() == 2
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
    expect(page.locator("select").first).to_have_value("0")
    ranks = page.get_by_role("slider")
    assert ranks.get_attribute("aria-valuetext") == "8", "it opens on a node"
    ranks.focus()
    page.keyboard.press("Home")
    assert ranks.get_attribute("aria-valuetext") == "1"
    expect(result.nth(3)).to_contain_text("100.0\u00a0%")
    page.keyboard.press("End")
    assert ranks.get_attribute("aria-valuetext") == "16,384"
    expect(page.locator("[role=status]")).to_contain_text("16,384 ranks: step")
    page.locator("select").first.select_option("1")
    assert page.get_by_label("Peak").input_value() == "312"
    page.get_by_label("A GPU’s link").fill("1")
    expect(page.locator("select").first).to_have_value("")
    page.get_by_label("Bucket").fill("0.01")
    expect(page.get_by_role("alert")).to_contain_text("buckets: choose a larger one")
    page.get_by_label("Bucket").fill("25")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.get_by_role("radio", name="by time").check(force=True)
    expect(page.get_by_label("Compute per micro-batch")).to_be_visible()
    expect(page.get_by_label("Tokens per micro-batch")).to_be_hidden()


def test_a_calculation_is_shared_by_its_address(page: Page) -> None:
    mount(page, "scaling-calculator")
    page.get_by_label("Parameters").fill("7000")
    page.get_by_role("radio", name="2", exact=True).first.check(force=True)
    address = page.get_by_role("link", name="Address of these numbers").get_attribute("href")
    assert address == "?sizing=parameters:7000,gradient:2"
    shown = page.locator(".results").inner_text()
    mount(page, "scaling-calculator", query=address)
    assert page.get_by_label("Parameters").input_value() == "7000"
    assert page.locator(".results").inner_text() == shown
    expect(page.get_by_role("alert")).to_be_hidden()


def test_nonsense_in_the_address_is_said(page: Page) -> None:
    mount(page, "scaling-calculator", query="?sizing=ranks:many")
    expect(page.get_by_role("alert")).to_have_text(
        "The address has ranks:many, expected a whole number from 1 to 16384. "
        "These are the defaults."
    )
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "8"


def test_worked_sizings_say_what_they_lead_to(page: Page) -> None:
    mount(page, "scaling-calculator")
    expect(page.locator(".worked")).to_contain_text("34 billion tokens take 10 days on one H100")
    page.get_by_role("link", name="on two nodes", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator(".worked")).to_contain_text("15 hours on 16 (efficiency")
    expect(page.get_by_role("link", name="on two nodes", exact=True)).to_be_focused()
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "16"
    page.get_by_label("Parameters").fill("1701")
    expect(page.locator(".worked")).to_be_hidden()
    page.get_by_role("link", name="one card").click()
    expect(page.locator(".worked")).to_contain_text("two are slower than one")


def test_the_tuner_follows_its_controls(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    mount(page, "bucket-tuner")
    cap = page.get_by_role("slider")
    assert cap.get_attribute("aria-valuetext") == "25 MiB, the default"
    expect(page.locator(".plot .marked").first).to_have_text("25 MiB")
    summary = page.locator(".summary")
    expect(summary).to_contain_text("44 buckets")
    cap.focus()
    page.keyboard.press("End")
    expect(summary).to_contain_text("1 bucket needs")
    page.get_by_role("radio", name="α and bandwidth").check(force=True)
    page.get_by_label("Bandwidth of a bucket").fill("1")
    expect(summary).to_contain_text("needs the link for 1.45\u00a0s")
    expect(page.locator(".widget > .note")).to_contain_text("The link is your own.")
    assert page.evaluate("document.getAnimations().length") == 0


DATA = {"bucket-timeline": recorded_pass()}


@pytest.mark.parametrize("width", [320, 360, 1280])
@pytest.mark.parametrize(
    "module",
    ["ring-stepper", "shard-explorer", "bucket-timeline", "bucket-tuner", "scaling-calculator"],
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
