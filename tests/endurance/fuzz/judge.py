"""Whether what was found is right: one word, and why."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .model import Spec
from .ranks import Found, Outcome, tensor_of


class Verdict(NamedTuple):
    word: str
    why: str = ""
    off: float = 0.0  # how far from torch's numbers, for "other bits"

    @property
    def fails(self) -> bool:
        return self.word in FAILURES


FAILURES = {
    "wrong": "gradients or weights that no mean gives, and nobody says so",
    "ranks disagree": "equal in the reference, but not on the ranks",
    "other bits": "right, but not torch's bits",
    "refused": "torch is right, ours refuses",
    "error": "an error that is no sentence, or not on all ranks",
    "hangs": "longer than the timeout of the group",
}
GOOD = {
    "same": "right, and torch's bits",
    "both refuse": "ours on every rank, with a sentence",
    "better": "torch is wrong, refuses or hangs; ours is right or refuses",
    "known": "a difference that is listed",
    "no program": "fails in one process, too",
}
REFUSALS = ("RuntimeError", "ValueError", "NotImplementedError")


class Known(NamedTuple):
    """A difference with its reason: for these words only, and where `holds`."""

    reason: str
    words: tuple[str, ...]
    holds: Callable[[Spec, Verdict], bool]


def blocks_with(spec: Spec, **wanted: Any) -> bool:
    """Whether a block has all of these values."""
    return any(
        all(block.get(key.replace("_", " ")) == value for key, value in wanted.items())
        for block in spec["blocks"]
    )


def steps_with(spec: Spec, kind: str) -> bool:
    return any(step.get("kind") == kind for step in spec["steps"])


KNOWN = [
    Known(
        "with 3 ranks, torch divides where ours multiplies by 1/3: with views and gradients that "
        "stay",
        ("other bits",),
        lambda spec, verdict: (
            spec["ranks"] == 3 and "views" in spec and verdict.off < last_bits(spec)
        ),
    ),
    Known(
        "PowerSGD draws other random numbers than torch's",
        ("other bits",),
        lambda spec, _: spec.get("comm hook") == "powerSGD",
    ),
    Known(
        "backward(create_graph=True) is refused",
        ("refused",),
        lambda spec, verdict: (
            steps_with(spec, "create_graph") and "create_graph=True" in verdict.why
        ),
    ),
    Known(
        "a grad_dtype of its own, of a gradient that a hook took away: the error is torch's",
        ("error",),
        lambda spec, verdict: "to a tensor with grad_dtype" in verdict.why,
    ),
    Known(
        "one PowerSGD state for two wrappers: torch fails on their sizes, too",
        ("error",),
        lambda spec, verdict: (
            spec.get("comm hook") == "powerSGD"
            and spec.get("wrap") == "inside"
            and "zip() argument" in verdict.why
        ),
    ),
    Known(
        "a layout of one rank is refused for frozen parameters, too, of which nothing is sent",
        ("refused",),
        lambda spec, verdict: "strides" in verdict.why and blocks_with(spec, frozen="before"),
    ),
    Known(
        "what is thawed after wrapping is refused also where no gradient of it is left to average",
        ("refused",),
        lambda spec, verdict: (
            "did not require a gradient" in verdict.why
            and (
                blocks_with(spec, frozen="thawed after", branch="never")
                or spec.get("hook", {}).get("kind") == "step"
            )
        ),
    ),
    Known(
        "an overflow hides what torch leaves local: ours refuses it",
        ("refused",),
        lambda spec, verdict: (
            bool(spec.get("overflow"))
            and ("assign=True" in verdict.why or "averaged already" in verdict.why)
        ),
    ),
    Known(
        "a rank that leaves a parameter out in the last step lets the others wait, as in torch",
        ("hangs",),
        lambda spec, verdict: (
            of_one_rank(spec)
            and ("find unused" not in spec or spec.get("wrap") in ("inside", "around"))
            and verdict.why == "torch's, too"
        ),
    ),
    Known(
        "where one rank lays a weight out anew, its optimizer rounds bfloat16 in another way, also "
        "with torch's wrapper: gradients are equal",
        ("ranks disagree",),
        lambda spec, verdict: (
            " step: " in verdict.why
            and blocks_with(spec, dtype="bfloat16")
            and any(block.get("layout", {}).get("ranks") == "one" for block in spec["blocks"])
        ),
    ),
    Known(
        "torch refuses an expanded buffer, and so does not come to what both do next: a rank that "
        "waits, a hook that gets None",
        ("error",),
        lambda spec, verdict: (
            blocks_with(spec, buffer="expanded")
            and (
                (of_one_rank(spec) and "ranks lose each other" in verdict.why)
                or (spec.get("hook", {}).get("kind") == "tensor" and "'NoneType'" in verdict.why)
            )
        ),
    ),
    Known(
        "a sparse buffer that nobody compares ends in torch's own error, before which a torch "
        "without NCCL refuses the hook",
        ("error",),
        lambda spec, verdict: (
            blocks_with(spec, buffer="sparse")
            and spec.get("init sync") is False
            and "sparse tensors" in verdict.why
        ),
    ),
    Known(
        "of two wrappers with check_reduction, which torch ignores, the outer one sends first: the "
        "sums of three ranks round in another order",
        ("other bits",),
        lambda spec, verdict: (
            bool(spec.get("check reduction"))
            and spec.get("wrap") in ("inside", "around", "beside")
            and verdict.off < last_bits(spec)
        ),
    ),
    Known(
        "a wrapper inside a model that rank 0 evaluates alone copies the buffers there: it waits, "
        "as torch's",
        ("hangs",),
        lambda spec, verdict: (
            spec.get("wrap") == "inside"
            and any(step.get("before") == "evaluation on rank 0" for step in spec["steps"])
            and verdict.why == "torch's, too"
        ),
    ),
    Known(
        "two wrappers of one model that search send in each rank's own order where graphs differ: "
        "messages of one size are mixed up, of two sizes the ranks wait; torch's wait, or with "
        "views raise",
        ("error", "wrong"),
        lambda spec, verdict: (
            of_one_rank(spec)
            and bool(spec.get("find unused"))
            and spec.get("wrap") in ("around", "beside")
            and (verdict.word == "wrong" or "ranks lose each other" in verdict.why)
        ),
    ),
    Known(
        "with find_unused_parameters hooks after accumulation run for an output left out, too, "
        "as in torch",
        ("wrong",),
        lambda spec, verdict: (
            bool(spec.get("find unused"))
            and steps_with(spec, "first head alone")
            and spec.get("hook", {}).get("kind") in ("scale", "replace")
            and ": heads.1." in verdict.why
        ),
    ),
    Known(
        "a wrapper inside copies the buffers whenever it is called, as torch's: again in the "
        "same step where its layer is used twice or checkpointed",
        ("wrong",),
        lambda spec, verdict: (
            spec.get("wrap") == "inside"
            and not spec["blocks"][0].keys().isdisjoint({"twice", "checkpoint"})
            and " step: blocks.0." in verdict.why
        ),
    ),
    Known(
        "the backward after a skipped batch sends even inside no_sync, so a hook that clamps sees "
        "a mean in the next one, as in torch",
        ("wrong",),
        lambda spec, verdict: (
            any(step.get("before") == "skipped batch" for step in spec["steps"])
            and spec.get("hook", {}).get("kind") == "clamp"
            and " mean: " in verdict.why
        ),
    ),
    Known(
        "a hook that steps leaves nothing for a GradScaler, but a wrapper gives the mean of "
        "nothing back, zeros, in which the scaler finds no inf",
        ("wrong",),
        lambda spec, verdict: (
            bool(spec.get("scaler"))
            and spec.get("hook", {}).get("kind") == "step"
            and "No inf checks were recorded" in verdict.why
        ),
    ),
    Known(
        "a hook that steps leaves nothing to clip, but a wrapper gives the mean of nothing back, "
        "zeros, which a norm that is not finite makes NaN, as in torch",
        ("wrong",),
        lambda spec, verdict: (
            bool(spec.get("overflow"))
            and bool(spec.get("clip"))
            and spec.get("hook", {}).get("kind") == "step"
            and verdict.why.endswith("off by inf")
        ),
    ),
    Known(
        "a cap that is not the same on all ranks is refused: torch takes rank 0's",
        ("refused",),
        lambda spec, verdict: (
            spec.get("option of rank 0") == "cap" and "bucket_cap_mb" in verdict.why
        ),
    ),
    Known(
        "check_reduction, which torch ignores, refuses what is left out at once",
        ("refused",),
        lambda spec, verdict: (
            bool(spec.get("check reduction")) and "got no gradient in this" in verdict.why
        ),
    ),
]


def judge(spec: Spec, found: Found) -> Verdict:
    verdict = judge_without_list(spec, found)
    for known in KNOWN:
        if verdict.word in known.words and known.holds(spec, verdict):
            return Verdict("known", known.reason)
    return verdict


def judge_without_list(spec: Spec, found: Found) -> Verdict:
    if any(outcome.hangs for outcome in found.miniddp):
        both = any(outcome.hangs for outcome in found.torch)
        return Verdict("hangs", "torch's, too" if both else "")
    reference = found.reference
    if all(outcome.trace is not None for outcome in found.miniddp):
        if reference[0].trace is None:
            if found.torch[0].trace is None:
                return Verdict("wrong", f"one process refuses: {reference[0].error}")
            return Verdict("no program", reference[0].error)
        if problem := wrong(spec, found.miniddp, reference):
            return problem
        if wrong_in_torch(spec, found):
            return Verdict("better", "right")
        if places := other_bits(found):
            return max(places, key=lambda place: place.off)
        return Verdict("same")
    return judge_refusal(spec, found)


def wrong_in_torch(spec: Spec, found: Found) -> bool:
    if any(outcome.trace is None for outcome in found.torch):
        return True
    return wrong(spec, found.torch, found.reference) is not None


def judge_refusal(spec: Spec, found: Found) -> Verdict:
    reference = found.reference[0]
    refusals = [o for o in found.miniddp if o.trace is None and not o.lost_connection]
    if not refusals and all(outcome.lost_connection for outcome in found.torch):
        return Verdict("hangs", "torch's, too")
    if not refusals:
        return Verdict("error", f"ranks lose each other: {first_error(found.miniddp)}")
    first = refusals[0]
    if same_as_alone(first, reference):
        return Verdict("no program", first.error)
    if same_everywhere(found.miniddp + found.torch):
        return Verdict("both refuse", first.error)
    if problem := no_sentence(first):
        return Verdict("error", f"{problem}: {first.kind}: {first.error}")
    if not wrong_in_torch(spec, found):
        return Verdict("refused", first.error)
    everywhere = len(refusals) == len(found.miniddp)
    if not everywhere and not of_one_rank(spec):
        return Verdict("error", f"not on every rank: {first.error}")
    if all(outcome.trace is not None for outcome in found.torch):
        return Verdict("better", f"refuses: {first.error}")
    return Verdict("both refuse", first.error)


def same_as_alone(first: Outcome, reference: Outcome) -> bool:
    same_words = first.error[:40] == reference.error[:40]
    return reference.trace is None and first.kind == reference.kind and same_words


def same_everywhere(outcomes: list[Outcome]) -> bool:
    """Whether both classes end in one error on every rank: then it is torch's."""
    errors = {(outcome.kind, outcome.error[:40]) for outcome in outcomes}
    return len(errors) == 1 and all(outcome.trace is None for outcome in outcomes)


def first_error(outcomes: list[Outcome]) -> str:
    return next((o.error for o in outcomes if o.trace is None), "")


def of_one_rank(spec: Spec) -> bool:
    """Whether only some ranks can see what is wrong: the others lose their connection."""
    if spec.get("option of rank 0") == "views":
        return True
    branches = ("rank 0", "changing ranks")
    layouts = [block.get("layout", {}) for block in spec["blocks"]]
    return any(block.get("branch") in branches for block in spec["blocks"]) or any(
        layout.get("ranks") == "one" and layout.get("when") == "after" for layout in layouts
    )


def no_sentence(outcome: Outcome) -> str:
    if outcome.kind not in REFUSALS:
        return "not a refusal"
    if outcome.raised_in != "miniddp":
        return "an error from below, not ours"
    if "\n" in outcome.error or not outcome.error or len(outcome.error) > 600:
        return "not one sentence"
    return ""


# Numbers


def wrong(spec: Spec, ranks: list[Outcome], reference: list[Outcome]) -> Verdict | None:
    """Where it is not what one process gets, or None."""
    if reference[0].trace is None:
        return Verdict("wrong", f"one process refuses: {reference[0].error}")
    tolerance = tolerance_of(spec)
    skips = any(step.get("before") == "skipped batch" for step in spec["steps"])
    for rank, (outcome, alone) in enumerate(zip(ranks, reference, strict=True)):
        assert outcome.trace is not None
        assert alone.trace is not None
        for (label, found), (_, wanted) in zip(outcome.trace, alone.trace, strict=True):
            if waits_for_more(spec, label):
                continue
            if skips and label.endswith("local"):
                continue  # the next backward sends what a skipped one has not: the mean is right
            for name in wanted:
                off = distance(found[name], wanted[name])
                if off > tolerance:
                    place = f"{label}: {name} on rank {rank} is off by {off:.1e}"
                    return Verdict("wrong", place)
    return disagreeing(spec, ranks, reference)


def waits_for_more(spec: Spec, label: str) -> bool:
    """Whether a bucket of both heads has had the backward of the first one alone."""
    number, _, what = label.partition(" ")
    return what == "first" and spec["steps"][int(number)].get("kind") == "backward per head"


def tolerance_of(spec: Spec) -> float:
    if spec.get("comm hook") == "powerSGD":
        return float("inf")
    if any(block.get("dtype") == "bfloat16" for block in spec["blocks"]):
        return 0.05
    return {"fp16": 0.01, "bf16": 0.05}.get(spec.get("comm hook", ""), 1e-3)


def distance(found: Any, wanted: Any) -> float:
    """The largest difference, over the largest entry; None stands for zeros."""
    if found is None and wanted is None:
        return 0.0
    if found is None or wanted is None:
        there = tensor_of(found or wanted)
        return float(there.ne(0).any())
    one = plain(found)
    other = plain(wanted)
    if one.shape != other.shape:
        return float("inf")
    both = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return float("inf")
    if not both.any():
        return 0.0
    off = (one - other)[both].abs().max().item()
    return float(off / max(other[both].abs().max().item(), 1e-3))


def plain(sent: Any) -> Tensor:
    tensor = tensor_of(sent)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.double()


def disagreeing(spec: Spec, ranks: list[Outcome], reference: list[Outcome]) -> Verdict | None:
    for rank, outcome in enumerate(ranks):
        alone = reference[rank].trace
        assert outcome.trace is not None
        assert ranks[0].trace is not None
        assert alone is not None
        assert reference[0].trace is not None
        for i, (label, found) in enumerate(outcome.trace):
            if waits_for_more(spec, label):
                continue
            for name, value in found.items():
                first = ranks[0].trace[i][1][name]
                if value != first and alone[i][1][name] == reference[0].trace[i][1][name]:
                    return Verdict("ranks disagree", f"{label}: {name} on ranks 0 and {rank}")
    return None


def other_bits(found: Found) -> list[Verdict]:
    """Where ours and torch's differ."""
    places = []
    for rank, (ours, theirs) in enumerate(zip(found.miniddp, found.torch, strict=True)):
        for (label, mine), (_, other) in zip(ours.trace or [], theirs.trace or [], strict=True):
            for name, value in mine.items():
                if value != other[name]:
                    place = f"{label}: {name} on rank {rank}{none(value, other[name])}"
                    off = distance(value, other[name])
                    places.append(Verdict("other bits", place, off))
    return places


def last_bits(spec: Spec) -> float:
    """A difference in the last bit of some gradients, after a few steps."""
    if any(block.get("dtype") == "bfloat16" for block in spec["blocks"]):
        return 0.02
    if blocks_with(spec, kind="batch norm"):  # which divides by what may be small
        return 1e-4
    return 1e-5


def none(ours: Any, theirs: Any) -> str:
    if ours is None or theirs is None:
        return f", None in {'miniddp' if ours is None else 'torch'} only"
    return ""
