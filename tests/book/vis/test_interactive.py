"""The moving diagrams compute what miniddp computes, and can be used by everyone.

Their scripts run in the browser of the tests, from files, without a site around them.
"""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page, Route, expect
from tests.instruments import test_nccl_tests, test_tensors

from instruments import h100, job, measurements, tensors
from instruments.cost import Link, adamw_seconds, copy_seconds_per_byte, ring_all_reduce_bytes
from instruments.flops import peak_flops
from instruments.memory import (
    activation_bytes,
    bucket_bytes,
    bytes_per_parameter,
    cast_bytes,
    logit_bytes,
    memory_per_rank,
)
from instruments.network import (
    ALGORITHMS,
    NODES,
    Network,
    fit_table,
    read_nccl_tests,
    steps,
    volume,
)
from instruments.simulator import Copies, Layer, buckets, expected_maximum, simulate
from instruments.tensors import MODELS
from instruments.tensors import layers as layers_of
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
                    range(length),
                    world_size,
                    rank,
                    chosen["shuffle"],
                    chosen["seed"],
                    drop_last=chosen["rest"] == "drop",
                )
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
        Layer(
            draw.choice([0, 0.001, 0.02]),
            draw.choice([0, 0.002, 0.05]),
            [draw.randint(1, 40 * MIB) for _ in range(draw.randint(0, 4))],
        )
        for _ in range(draw.randint(1, 9))
    ]


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
                "filling": draw.choice([0, 1e-9]),
                "emptying": draw.choice([0, 1e-9]),
                "optimizer": draw.choice([0, 0.01]),
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
            copies=Copies(options["filling"], options["emptying"]),
            optimizer=options["optimizer"],
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


IN_MODELS = """names => import("/vis/models.js").then(m => ({
    tensors: m.MODELS, layers: names.map(name => m.layersOf(m.MODELS[name], 3, 2)),
    products: names.map(name => m.productsOf(m.MODELS[name])),
}))"""


def test_the_models_are_those_of_the_instruments(compute: Compute) -> None:
    found = compute.page.evaluate(IN_MODELS, list(MODELS))
    for i, (name, model) in enumerate(MODELS.items()):
        shown = found["tensors"][name]
        assert (shown["title"], shown["unit"], shown["tied"]) == (
            model.title, model.unit, model.tied,
        )  # fmt: skip
        assert [
            (each["name"], tuple(each["shape"]), each["products"]) for each in shown["parameters"]
        ] == list(model.parameters)
        assert found["products"][i] == model.products
        made = layers_of(model, 3.0, gradient_bytes=2)
        assert [layer["gradients"] for layer in found["layers"][i]] == [
            layer.gradient_bytes for layer in made
        ]
        assert [layer["backward"] for layer in found["layers"][i]] == close(
            [layer.backward for layer in made]
        )


PASTE = """texts => Promise.all([import("/vis/models.js"), import("/vis/network.js")]).then(
    ([models, network]) => texts.map(([reader, text]) => {
        try { return (reader === "parse" ? models.parse : network.readNcclTests)(text); }
        catch (error) { return error.message; }
    }))"""


def test_a_pasted_list_is_read_as_python_reads_it(compute: Compute) -> None:
    texts = [test_tensors.LISTED, *test_tensors.NONSENSE]
    found = compute.page.evaluate(PASTE, [["parse", text] for text in texts])
    assert [
        (part["name"], tuple(part["shape"]), part["products"]) for part in found[0]["parameters"]
    ] == list(tensors.parse(texts[0]).parameters)
    for text, problem in zip(texts[1:], found[1:], strict=True):
        with pytest.raises(ValueError, match=re.escape(problem)):
            tensors.parse(text)


def test_what_nccl_tests_printed_is_read_as_python_reads_it(compute: Compute) -> None:
    rows = {2**20: 90.0, 2**21: 80.0, 2**22: 85.0, 2**25: 198.9, 2**30: 4016.4}
    outputs = [
        test_nccl_tests.output(8, columns, rows)
        for columns in (test_nccl_tests.NOW, test_nccl_tests.BEFORE)
    ]
    outputs += test_nccl_tests.TAGGED
    found = compute.page.evaluate(PASTE, [["nccl", text] for text in outputs])
    for text, shown in zip(outputs, found, strict=True):
        table = read_nccl_tests(text)
        assert shown["ranks"] == table.world_size
        assert shown["points"] == [
            [size, close(time)] for size, time in zip(table.num_bytes, table.seconds, strict=True)
        ]
        [other] = compute("network", "measuredOn", [[shown, 64]])
        assert [time for _, time in other] == close(list(table.on(64).seconds))
        sizes = [1000, 3 * 2**20, 25 * MIB, 2**31]
        seconds = compute("network", "measuredSeconds", [[shown["points"], size] for size in sizes])
        assert seconds == close([table.all_reduce_seconds(size) for size in sizes])


def test_another_output_is_refused_as_in_python(compute: Compute) -> None:
    texts = list(test_nccl_tests.REFUSED)
    found = compute.page.evaluate(PASTE, [["nccl", text] for text in texts])
    for text, problem in zip(texts, found, strict=True):
        with pytest.raises(ValueError, match="expected all that") as error:
            read_nccl_tests(text)
        said = str(error.value).replace("'", "’")
        assert problem.replace("“", '"').replace("”", '"') == said


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
    node = NODES["DGX H100"]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"measured": "allreduce_h100_8gpu", "backward": 0.026, "model": "smollm2-360m-classifier"},
         measured.all_reduce_seconds),
        ({"measured": "h100_64", "backward": 0.07, "model": "smollm2-1.7b"},
         lambda size: node.all_reduce_seconds(size, 64)),
        ({**own, "model": "resnet-50"}, lambda size: 2e-4 + size / 5e9),
    ]  # fmt: skip
    for inputs, all_reduce in cases:
        model = MODELS[inputs["model"]]
        layers = layers_of(model, 1.5 * inputs["backward"])
        caps = [0.25, 25, 400]
        for cap, found in zip(
            caps, compute("bucket-tuner", "tuned", [[inputs, cap] for cap in caps]), strict=True
        ):
            plan = buckets(layers, int(cap * MIB), MIB if cap == 25 else int(cap * MIB))
            step = simulate(layers, all_reduce, plan, stolen=h100.STOLEN, copies=h100.COPIES)
            assert found["buckets"] == len(plan)
            assert found["exposed"] == close(step.exposed)
            assert found["seconds"] == close(step.seconds)


def test_the_still_of_the_tuner_shows_what_it_computes(compute: Compute) -> None:
    root = ElementTree.parse(ROOT / "vis" / "bucket-tuner.svg").getroot()
    still = {float(dot.get("data-cap", "")): float(dot.get("data-exposed", ""))
             for dot in root.iter() if dot.get("data-cap")}  # fmt: skip
    inputs = {
        "measured": "allreduce_h100_8gpu",
        "backward": 0.026,
        "model": "smollm2-360m-classifier",
    }
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
            "model": draw.choice(["resnet-50", "gpt-2", "smollm2-1.7b"]),
            "gradient": draw.choice([2, 4]),
            "views": draw.choice([0, 1]),
            "tokens": draw.choice([512, 8192]),
            "batches": draw.choice([1, 2, 16]),
            "peak": 989.5,
            "reached": draw.choice([20, 40]),
            "time": draw.choice([0, 0.5, 250]),
            "memory": 80,
            "moved": draw.choice([2039, 3350]),
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
    assert 1e9 * defaults["moved"] == h100.MEMORY
    assert defaults["stolen"] == round(100 * h100.STOLEN, 1)
    for gpus in (8, 16, 256):
        [found] = compute(
            "scaling-calculator", "step", [[{**defaults, "stolen": 100 * h100.STOLEN}, gpus]]
        )
        job_step = job.step(gpus, job.EIGHT_CARDS)
        assert found["sizes"] == job.bucket_sizes()
        assert found["seconds"] == close(job_step.seconds)
        assert found["compute"] == close(job_step.compute)


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
        model = MODELS[each["model"]]
        cap = each["bucket"] * MIB
        compute_seconds = each["time"] / 1000 or tensors.compute_seconds(
            model, each["tokens"], each["peak"] * 1e10 * each["reached"]
        )
        layers = layers_of(model, compute_seconds, each["gradient"])
        plan = buckets(layers, cap, MIB if each["bucket"] == 25 else cap)
        gradients = [size for layer in layers for size in layer.gradient_bytes]
        assert found["sizes"] == [sum(gradients[i] for i in bucket) for bucket in plan]
        harmonic = sum(1 / i for i in range(1, n + 1))
        copied = copy_seconds_per_byte(1e9 * each["moved"]) if n > 1 else 0.0
        optimizer = adamw_seconds(model.elements, 1e9 * each["moved"])
        last = simulate(
            layers,
            lambda size, network=network, n=n: network.all_reduce_seconds(size, n),
            plan,
            stolen=each["stolen"] / 100,
            slowest=1 + each["spread"] / 100 * (harmonic - 1),
            copies=Copies(copied, 0.0 if each["views"] else copied),
            optimizer=optimizer,
        )
        slowest = 1 + each["spread"] / 100 * (harmonic - 1)
        earlier = (each["batches"] - 1) * compute_seconds * slowest
        alone = each["batches"] * compute_seconds + optimizer
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
    chosen = {**defaults["inputs"], "ranks": 64, "model": "gpt-2", "gradient": 2, "time": 1e-6}
    address = compute("scaling-calculator", "writeAddress", [[chosen]])[0]
    assert address == "?sizing=ranks:64,model:gpt-2,gradient:2,time:0.000001"
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
    "model:own": "The address has model:own, expected one of resnet-50, vit-b-16,",
    "model:": "expected one of resnet-50, vit-b-16,",
    "peak:-1": "expected a number from 0.001 to 1000000.",
    "peak:1e999": "expected a number from 0.001 to 1000000.",
    "peak:0x10": "expected a number",
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


@pytest.mark.parametrize(("gradient", "precision"), [(4, "autocast"), (2, "bf16")])
def test_whether_it_fits_is_what_the_formula_says(
    compute: Compute, gradient: int, precision: str
) -> None:
    defaults = compute("scaling-calculator", "readAddress", [[""]])[0]["inputs"]
    chosen = {**defaults, "gradient": gradient}
    [found] = compute("scaling-calculator", "fits", [[chosen]])
    count = MODELS["smollm2-1.7b"].elements
    kept = activation_bytes(tensors.SMOLLM2_1_7B, 4096, precision) + logit_bytes(49152, 4096)
    kept += cast_bytes(tensors.SMOLLM2_1_7B, count) if gradient == 4 else 0
    assert found["activations"] == kept
    assert found["buckets"] == bucket_bytes(count, gradient, views=False)
    assert found["total"] == 16 * count + found["buckets"] + kept
    assert found["fits"]
    large, viewed, unknown = (
        compute("scaling-calculator", "fits", [[{**chosen, **change}]])[0]
        for change in ({"model": "llama-3-8b"}, {"views": 1}, {"model": "resnet-50"})
    )
    assert not large["fits"]
    assert found["total"] - viewed["total"] == gradient * count
    assert unknown["activations"] is None


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
    context.set_default_navigation_timeout(60_000)  # on a busy machine
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
    gpu = page.locator("fieldset select").first
    expect(gpu).to_have_value("0")
    expect(result.first).to_contain_text("it fits")
    ranks = page.get_by_role("slider")
    assert ranks.get_attribute("aria-valuetext") == "8", "it opens on a node"
    ranks.focus()
    page.keyboard.press("Home")
    assert ranks.get_attribute("aria-valuetext") == "1"
    expect(result.nth(4)).to_contain_text("100.0\u00a0%")
    page.keyboard.press("End")
    assert ranks.get_attribute("aria-valuetext") == "16,384"
    expect(page.locator("[role=status]")).to_contain_text("16,384 ranks: step")
    gpu.select_option("1")
    assert page.get_by_label("Peak").input_value() == "312"
    page.get_by_label("A GPU’s link").fill("1")
    expect(gpu).to_have_value("")
    page.get_by_label("Model").select_option("llama-3-8b")
    expect(result.first).to_contain_text("it does not fit")
    page.get_by_role("radio", name="by time").check(force=True)
    expect(page.get_by_label("Compute per micro-batch")).to_be_visible()
    expect(page.get_by_label("Tokens per micro-batch")).to_be_hidden()


def test_a_list_and_a_link_of_one_s_own_are_pasted(page: Page) -> None:
    mount(page, "scaling-calculator")
    result = page.locator(".results div")
    page.get_by_label("Model").select_option("own")
    expect(page.get_by_role("link", name="Address of these numbers")).to_be_hidden()
    tensors_box = page.get_by_label("Its tensors")
    tensors_box.fill("a (1000, 1000)\nb (1000, 30000)")
    expect(result.nth(2)).to_contain_text("2 buckets, 124\u00a0MB")
    tensors_box.fill("a (1000, 1000)\nb (1000; 30000)")
    expect(page.get_by_role("alert").locator("visible=true")).to_contain_text(
        "line 2: expected a name and a shape"
    )
    expect(result.nth(2)).to_contain_text("2 buckets, 124\u00a0MB")
    tensors_box.fill("1000000")
    expect(result.nth(2)).to_contain_text("1 bucket, 4\u00a0MB")
    page.get_by_text("A link that was measured").click()
    link = page.get_by_label("What nccl-tests")
    link.fill(test_nccl_tests.output(8, test_nccl_tests.NOW, {2**20: 9000.0, 2**22: 9000.0}))
    expect(result.nth(2)).to_contain_text("9\u00a0ms")
    link.fill("Avg bus bandwidth: 5")
    expect(page.get_by_role("alert").locator("visible=true")).to_contain_text(
        "expected all that nccl-tests"
    )


def test_a_calculation_is_shared_by_its_address(page: Page) -> None:
    mount(page, "scaling-calculator")
    page.get_by_label("Model").select_option("llama-3-8b")
    page.get_by_role("radio", name="2", exact=True).first.check(force=True)
    address = page.get_by_role("link", name="Address of these numbers").get_attribute("href")
    assert address == "?sizing=model:llama-3-8b,gradient:2"
    shown = page.locator(".results").inner_text()
    mount(page, "scaling-calculator", query=address)
    assert page.get_by_label("Model").input_value() == "llama-3-8b"
    assert page.locator(".results").inner_text() == shown
    expect(page.get_by_role("alert").locator("visible=true")).to_have_count(0)


def test_nonsense_in_the_address_is_said(page: Page) -> None:
    mount(page, "scaling-calculator", query="?sizing=ranks:many")
    expect(page.get_by_role("alert").locator("visible=true")).to_have_text(
        "The address has ranks:many, expected a whole number from 1 to 16384. "
        "These are the defaults."
    )
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "8"


def test_worked_sizings_say_what_they_lead_to(page: Page) -> None:
    mount(page, "scaling-calculator")
    expect(page.locator(".worked")).to_contain_text("34 billion tokens take 12 days on one H100")
    page.get_by_role("link", name="on two nodes", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator(".worked")).to_contain_text("19 hours on 16 (efficiency")
    expect(page.get_by_role("link", name="on two nodes", exact=True)).to_be_focused()
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "16"
    page.get_by_label("Bucket").fill("26")
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
