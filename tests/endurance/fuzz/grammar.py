"""Programs drawn at random: most have a few features, so that most of them run to their end."""

import random
from collections.abc import Iterator
from typing import Any

from .loop import KINDS
from .model import HOOKS, OUTPUTS, Spec

BLOCKS = {
    "linear": 6, "wide": 3, "embedding": 2, "layer norm": 2, "batch norm": 2, "buffer": 4,
    "conv": 2, "conv 1x1": 2, "complex": 1, "scalar": 1, "lazy": 0.15, "sparse weight": 0.15,
}  # fmt: skip
BUFFERS = [
    "float",
    "int",
    "bool",
    "half",
    "int16",
    "complex",
    "expanded",
    "transposed",
    "empty",
    "sized",
    "sparse",
]
BRANCHES = ("odd steps", "rank 0", "changing ranks", "never")
LAYOUTS = {
    "linear": ("transposed", "gaps"),
    "wide": ("transposed", "gaps"),
    "conv": ("channels last",),
    "conv 1x1": ("strides of size one", "channels last"),
}
BETWEEN = ("evaluation", "evaluation on rank 0", "skipped batch", "state dict",
           "assigned state dict", "new optimizer")  # fmt: skip
CAPS = (0, 0.0001, 0.001, 1)
COMM_HOOKS = ("allreduce", "fp16", "bf16", "powerSGD")


def draw(seed: int) -> Spec:
    """The program of this number."""
    rng = random.Random(seed)

    def chance(probability: float) -> bool:
        return rng.random() < probability

    spec: Spec = {"seed": seed, "ranks": 2 if chance(0.7) else 3}
    spec["blocks"] = [draw_block(rng) for _ in range(rng.randint(1, 3))]
    spec["steps"] = [draw_step(rng) for _ in range(rng.randint(2, 4))]
    rare = {
        "output": (0.35, [*OUTPUTS, "with parameter"]),
        "two heads": (0.3, [True]),
        "views": (0.3, [True]),
        "cap": (0.4, CAPS),
        "find unused": (0.35, [True]),
        "check reduction": (0.05, [True]),
        "broadcast buffers": (0.15, [True, False]),
        "forward sync buffers": (0.1, [True, False]),
        "init sync": (0.05, [False]),
        "start": (0.4, ["different"]),
        "comm hook": (0.15, COMM_HOOKS),
        "scaler": (0.1, [True]),
        "clip": (0.1, [True]),
        "momentum": (0.2, [0.9]),
        "overflow": (0.04, [1]),
        "wrap": (0.12, ["inside", "beside", "around", "deep copy"]),
        "replaced": (0.03, ["before", "after"]),
        "differs": (0.03, ["shape", "dtype", "frozen", "more"]),
        "input gradient": (0.2, [False]),
    }
    for name, (probability, values) in rare.items():
        if chance(probability):
            spec[name] = rng.choice(values)
    if spec.get("init sync") is False:
        spec.pop("start", None)
        spec.pop("differs", None)  # then nobody looks: with torch neither
        for block in spec["blocks"]:
            block.pop("layout", None)
            if block.get("buffer") == "sized":
                block["buffer"] = "float"
    if spec.get("wrap") == "beside":  # each wrapper copies buffers when its forward comes
        spec["blocks"] = [{**block, "kind": "linear"} for block in spec["blocks"]]
    if chance(0.2):
        kind = rng.choice(["tensor", *HOOKS])
        when, on = rng.choice(["before", "after"]), rng.choice(["all", "one"])
        spec["hook"] = {"kind": kind, "when": when, "on": on}
    if chance(0.03) and "init sync" not in spec:
        alone, value = rng.choice([("views", True), ("cap", 0.001)])
        spec["option of rank 0"] = alone
        spec.setdefault(alone, value)
    return spec


def draw_block(rng: random.Random) -> Spec:
    kind = rng.choices(list(BLOCKS), list(BLOCKS.values()))[0]
    block: Spec = {"kind": kind}
    if kind == "buffer":
        block["buffer"] = rng.choice(BUFFERS)
    if kind in LAYOUTS and rng.random() < 0.2:
        block["layout"] = {
            "how": rng.choice(LAYOUTS[kind]),
            "ranks": rng.choice(["all", "one"]),
            "when": rng.choice(["before", "before", "after"]),
        }
    rare = {
        "twice": (0.1, [True]),
        "checkpoint": (0.12, ["plain", "plain", "reentrant"]),
        "branch": (0.1, BRANCHES),
        "frozen": (0.08, ["before", "before", "after", "thawed after"]),
        "same": (0.06, [True]),
        "tied": (0.08, [True]),
    }
    for name, (probability, values) in rare.items():
        if rng.random() < probability:
            block[name] = rng.choice(values)
    if kind in ("linear", "wide", "layer norm") and rng.random() < 0.12:
        block["dtype"] = rng.choice(["double", "bfloat16"])
        if block["dtype"] == "bfloat16" and rng.random() < 0.3:
            block["grad dtype"] = True
    return block


def draw_step(rng: random.Random) -> Spec:
    step: Spec = {}
    if rng.random() < 0.3:
        step["zero"] = rng.choice(["zeros", "zeros", "never"])
    if rng.random() < 0.2:
        step["micro"] = rng.randint(1, 2)
    if rng.random() < 0.25:
        step["kind"] = rng.choice([kind for kind in KINDS if kind != "plain"])
    if rng.random() < 0.15:
        step["before"] = rng.choice(BETWEEN)
    return step


def features(spec: Any, name: str = "") -> Iterator[str]:
    """What the program has in it, one string a feature."""
    if isinstance(spec, list):
        for inner in spec:
            yield from features(inner, name)
    elif isinstance(spec, dict):
        for key, value in spec.items():
            if key != "seed":
                yield from features(value, f"{name} {key}".strip())
    else:
        yield f"{name}: {spec}"
