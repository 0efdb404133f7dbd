"""A smaller program that still fails in the same way, and a file that runs it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .model import Spec

FILES = ("model.py", "loop.py", "program.py", "reference.py", "ranks.py")
NEEDED = ("seed", "ranks", "blocks", "steps", "kind", "how", "when", "on")


def shrink(spec: Spec, still_fails: Callable[[Spec], bool], tries: int = 60) -> Spec:
    """Drop a part after the other for as long as it still fails."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in without_a_part(spec):
            tries -= 1
            if tries < 0:
                return spec
            if still_fails(candidate):
                spec = candidate
                smaller = True
                break
    return spec


def without_a_part(spec: Spec) -> Iterator[Spec]:
    """Each spec that has a part less, large parts first."""
    for name in ("steps", "blocks"):
        for i in range(len(spec[name])):
            if len(spec[name]) > 1:
                yield {**spec, name: spec[name][:i] + spec[name][i + 1 :]}
    if spec["ranks"] > 2:
        yield {**spec, "ranks": 2}
    for name in spec:
        if name not in NEEDED:
            yield without(spec, name)
    for name in ("steps", "blocks"):
        for i, part in enumerate(spec[name]):
            for smaller in smaller_parts(name, part):
                yield {**spec, name: [*spec[name][:i], smaller, *spec[name][i + 1 :]]}


def smaller_parts(name: str, part: Spec) -> Iterator[Spec]:
    for key in part:
        if name == "steps" or key not in ("kind", "buffer"):
            yield without(part, key)
    if name == "blocks" and part["kind"] != "linear":
        yield {**without(part, "buffer"), "kind": "linear"}


def without(spec: Spec, name: str) -> Spec:
    return {key: value for key, value in spec.items() if key != name}


# A file that runs


def stand_alone(spec: Spec, comment: str) -> str:
    """`python FILE miniddp|torch|alone` prints what each rank has."""
    here = Path(__file__).parent
    sources = [(here / name).read_text() for name in FILES]
    lines = "\n".join(f"# {line}" for line in comment.splitlines())
    pieces = [body(source) for source in sources]
    return "\n".join([lines, *pieces, f"SPEC = {literal(spec)}", MAIN])


def body(source: str) -> str:
    """Without what it imports from its own folder."""
    return "\n".join(line for line in source.splitlines() if not line.startswith("from ."))


def literal(spec: Any) -> str:
    text = json.dumps(spec, indent=4)
    for json_word, word in (("true", "True"), ("false", "False"), ("null", "None")):
        text = text.replace(f": {json_word}", f": {word}")
    return text


MAIN = """

def show(outcomes, alone):
    for rank, outcome in enumerate(outcomes):
        if outcome.trace is None:
            print(f"rank {rank}: {outcome.kind}: {outcome.error}")
            continue
        print(f"rank {rank} runs to its end")
        for i, (label, found) in enumerate(outcome.trace):
            for name, sent in found.items():
                right = alone[rank].trace and alone[rank].trace[i][1][name]
                if sent == right or sent is None or right is None:
                    if (sent is None) != (right is None):
                        print(f"  {label}: {name} is None, but not in the reference, or only there")
                    continue
                off = (tensor_of(sent) - tensor_of(right)).abs()
                if off.numel() and off.max() > 1e-4:
                    size = tensor_of(right).abs().max()
                    print(f"  {label}: {name} is off by {off.max():.1e}, of {size:.1e}")


if __name__ == "__main__":
    import sys

    which = sys.argv[1] if len(sys.argv) > 1 else "miniddp"
    if len(sys.argv) > 2:
        SPEC["ranks"] = int(sys.argv[2])
    ranks = Ranks(SPEC["ranks"])
    found = ranks.run(SPEC)
    ranks.stop()
    show(getattr(found, which), found.reference)
"""
