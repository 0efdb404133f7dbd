"""How many times faster others became by each remedy, from their published tables."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from instruments.measurements import Row, read

MEASURES = (
    ("TF32 products", "tensor cores (TF32 matmul)", "TF32 matmul precision"),
    ("bf16", "bfloat16", "bfloat16 autocast"),
    (
        "fused attention (SDPA)",
        "FlashAttention through scaled_dot_product_attention",
        "FlashAttention",
    ),
    ("fused AdamW", "fused AdamW", "fused AdamW"),
    ("pinned memory", "pinned memory in the loader", ""),
    ("torch.compile", "torch.compile", "torch.compile"),
    ("a larger batch", "larger batch", ""),
    ("buckets during backward", "", ""),
    ("accumulation of 4", "", ""),
)
"""Of each, what the tables of the A100 and of GPT-2 call it, if they have it."""


@dataclass(frozen=True)
class Effect:
    """What a remedy brought to a GPT on an A100, to GPT-2, and to others."""

    remedy: str
    a100: float | None
    gpt2: float | None
    others: dict[str, float]


def effects() -> list[Effect]:
    a100 = factors(read("gpt_training_step_repaired_a100"), "tokens_per_s", True)
    gpt2 = factors(read("gpt2_124m_step_time"), "ms_per_step", False)
    others = {
        "torch.compile": compiling(),
        "buckets during backward": buckets(),
        "accumulation of 4": accumulating(),
    }
    return [
        Effect(name, a100.get(first), gpt2.get(second), others.get(name, {}))
        for name, first, second in MEASURES
    ]


def factors(rows: list[Row], column: str, more_is_better: bool) -> dict[str, float]:
    """Change → how many times faster it made the step of the row above."""
    found = {}
    for before, after in pairwise(rows):
        ratio = after[column] / before[column]
        found[after["change"]] = ratio if more_is_better else 1 / ratio
    return found


def compiling() -> dict[str, float]:
    rates: dict[str, Any] = {
        row["techniques"]: row["tokens_per_s_per_gpu"]
        for row in read("fsdp_scaling_llama3_8b")
        if row["gpus"] == 8
    }
    return {"Llama 8B on 8 H100": rates["FSDP + torch.compile"] / rates["FSDP"]}


def buckets() -> dict[str, float]:
    milliseconds: dict[str, Any] = {
        row["record"]: row["step_avg_ms"]
        for row in read("gradient_sync_variants_8xh100")
    }
    ratio = milliseconds["21 on newer torch"] / milliseconds["23"]
    return {"8 H100 in a node": ratio}


def accumulating() -> dict[str, float]:
    seconds: dict[Any, Any] = {
        (row["nodes"], row["method"]): row["s_per_batch"] for row in read("no_sync_t4")
    }
    method = "no_sync around forward and backward"
    return {
        "2 T4 in a node": seconds[1, "baseline"] / seconds[1, method],
        "in two nodes": seconds[2, "baseline"] / seconds[2, method],
    }
