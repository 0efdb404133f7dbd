"""Memory of a training step per rank, in bytes, and what each way to shard it sends.

The stages are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020: 0 replicates everything (DDP), 1 shards the
optimizer's state over the ranks, 2 the gradients too, 3 the parameters too.
What is gathered for a moment is not included, nor what the CUDA context, NCCL's buffers
and the gaps of the allocator take. Every function raises `ValueError` for a bad
argument.
"""

import math
from dataclasses import dataclass

from instruments.cost import check_amounts, check_counts
from instruments.tensors import MODELS, Llama

STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""Values of optimizer state per parameter: none, the momentum, Adam's two moments."""


@dataclass(frozen=True)
class Memory:
    """Bytes for parameters, gradients and optimizer state.

    The fp32 copy of the parameters, where there is one, belongs to the optimizer.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def bytes_per_parameter(optimizer: str = "adam", precision: str = "fp32") -> Memory:
    """Bytes for each parameter with `optimizer` "sgd", "momentum" or "adam".

    | precision | parameters | gradients | optimizer | Adam's total |
    |---|---|---|---|---|
    | fp32 | 4 | 4 | state | 16 |
    | mixed | 2 | 2 | 4 + state | 16 |
    | mixed_fp32_gradients | 2 | 2 + 4 | 4 + state | 20 |

    The state is fp32. "mixed" is ZeRO's 2 + 2 + 12: an fp32 copy of the parameters
    belongs to the optimizer. The last line also keeps fp32 gradients (Ultra-Scale
    Playbook). The scaling-book counts 10 bytes: 2 + 8, without gradients and without
    the fp32 copy. `torch.autocast` is "fp32": it casts for the moment of computing.
    """
    if optimizer not in STATES:
        raise ValueError(
            f"optimizer must be one of {', '.join(STATES)}, not {optimizer!r}"
        )
    state = 4 * STATES[optimizer]
    rows = {
        "fp32": Memory(4, 4, state),
        "mixed": Memory(2, 2, 4 + state),
        "mixed_fp32_gradients": Memory(2, 6, 4 + state),
    }
    if precision not in rows:
        raise ValueError(
            f"precision must be one of {', '.join(rows)}, not {precision!r}"
        )
    return rows[precision]


def memory_per_rank(
    parameter_count: int, world_size: int, stage: int, per_parameter: Memory
) -> Memory:
    """Bytes on one rank; one parameter needs `per_parameter` (`bytes_per_parameter`).

    What is sharded takes ⌈P / N⌉ of P parameters: the last shard is padded.
    """
    check_amounts(parameter_count=parameter_count)
    check_counts(world_size=world_size)
    _check_stage(stage)
    shard = math.ceil(parameter_count / world_size)
    return Memory(
        per_parameter.parameters * (shard if stage >= 3 else parameter_count),
        per_parameter.gradients * (shard if stage >= 2 else parameter_count),
        per_parameter.optimizer * (shard if stage >= 1 else parameter_count),
    )


def communication_elements(parameter_count: int, world_size: int, stage: int) -> float:
    """Elements that a rank sends in a step: (N - 1) / N times 2 P, or 3 P at stage 3.

    Stages 0 to 2 reduce-scatter the gradients and all-gather: the gradients (an
    all-reduce) or the updated parameters. Stage 3 gathers the parameters twice, for
    forward and for backward (ZeRO, section 7). Stage 1 on top of DDP, as in
    `ShardedOptimizer`, sends 3 P: a whole all-reduce, then the parameters.
    """
    check_amounts(parameter_count=parameter_count)
    check_counts(world_size=world_size)
    _check_stage(stage)
    passes = 3 if stage == 3 else 2
    return passes * parameter_count * (world_size - 1) / world_size


def _check_stage(stage: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0 (DDP), 1, 2 or 3, not {stage!r}")


def bucket_bytes(parameter_count: int, gradient_bytes: int, views: bool) -> int:
    """What DDP's buckets hold beside the gradients: all of them again.

    0 where the gradients are views of the buckets (`gradient_as_bucket_view=True`).
    """
    check_amounts(parameter_count=parameter_count)
    return 0 if views else parameter_count * gradient_bytes


# Activations

KEPT = {"fp32": (32, 8, 16), "autocast": (30, 4, 8), "bf16": (20, 4, 8)}
"""Bytes that a layer keeps for each token: per element of the hidden state, of keys and
of the inner width. Of the hidden state these are: in and out of both norms, what goes
into each product, queries, and what attention gives. Under autocast each product casts
its own input."""

KEPT_AT_END = {"fp32": 12, "autocast": 10, "bf16": 8}
"""The same for the last norm and the output's product, per element of the hidden
state."""

LOGIT_BYTES = 12
"""For each token and each word: logits, their logarithmic softmax, and the gradient,
all float32, or bfloat16 twice in place of one."""


def activation_bytes(config: Llama, tokens: int, precision: str = "autocast") -> int:
    """What forward of a Llama keeps for backward, without logits and casts of weights.

    As transformers writes it, with PyTorch's own attention, which does not keep the
    scores: "fp32", "autocast" to bfloat16 from float32 weights, or "bf16" throughout.
    What is counted per token is exact; the tables of the rotary embedding are left out.
    """
    check_amounts(tokens=tokens)
    if precision not in KEPT:
        raise ValueError(
            f"precision must be one of {', '.join(KEPT)}, not {precision!r}"
        )
    hidden, keys, inner = KEPT[precision]
    width = config.hidden_size // config.num_attention_heads
    layer = hidden * config.hidden_size
    layer += keys * width * config.num_key_value_heads
    layer += inner * config.intermediate_size
    layer += 4 * config.num_attention_heads + 8  # of the softmax; of both norms
    end = KEPT_AT_END[precision] * config.hidden_size + 12
    return tokens * (config.num_hidden_layers * layer + end)


def resnet50_activation_bytes(images: int) -> int:
    """What forward of ResNet-50 keeps for backward in float32, images of 224 x 224.

    The output of each convolution, which its batch norm reads again, and that of each
    ReLU, which the next convolution reads. A shortcut ends in a sum and has no ReLU.
    Max pooling also keeps where each maximum was, in 8 bytes.
    """
    check_amounts(images=images)
    convolutions = [
        (parameter.name, parameter.shape[0] * parameter.products)
        for parameter in MODELS["resnet-50"].parameters
        if len(parameter.shape) == 4
    ]
    outputs = sum(elements for _, elements in convolutions)
    rectified = sum(n for name, n in convolutions if "downsample" not in name)
    pooled = 64 * 56 * 56
    return images * (4 * (outputs + rectified + pooled) + 8 * pooled)


def cast_bytes(config: Llama, parameter_count: int) -> int:
    """The bfloat16 copies of the matrices, which autocast keeps until backward."""
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    return 2 * (parameter_count - norms)


def logit_bytes(vocabulary: int, tokens: int) -> int:
    """What the loss holds at its peak, when backward begins."""
    check_amounts(vocabulary=vocabulary, tokens=tokens)
    return LOGIT_BYTES * vocabulary * tokens
