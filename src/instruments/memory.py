"""Memory of a training step per rank, in bytes, and what each way to shard it sends.

The stages are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020: 0 replicates everything (DDP), 1 shards the
optimizer's state over the ranks, 2 the gradients too, 3 the parameters too.
Activations, buffers, and what is gathered for a moment are not included. Every function
raises `ValueError` for a bad argument.
"""

import math
from dataclasses import dataclass

from instruments.cost import check_amounts, check_counts

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
