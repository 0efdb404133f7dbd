"""What kind of work an operator or a GPU kernel does, told by its name."""

import functools
import re

COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
OTHER = "other"

COMMUNICATION_KERNELS = (
    r"(n|r|ms|one)ccl|nvshmem|(one|two)_shot_all_reduce|cross_device_reduce|multimem_"
    r"|allreduce_fusion|ep::(inter|intra)node"
)
"""How the names of kernels that send tell it: also those of vLLM, FlashInfer, DeepEP."""

_ELEMENTWISE = (
    "add sub rsub mul div pow square sqrt rsqrt reciprocal exp log neg abs sin cos "
    "tanh sigmoid relu gelu silu where clamp masked_fill addcmul addcdiv lerp fill "
    "zero mean sum eq ne lt gt"
)
_PATTERNS = {
    COMMUNICATION: rf"{COMMUNICATION_KERNELS}|^gloo:|^c10d::",
    OPTIMIZER: r"^optimizer\.|multi_tensor_apply|_fused_(adam|sgd|adagrad)|fusedadam",
    "attention": r"flash|fmha|sdpa|scaled_dot_product|attention"
    r"|^(?!.*log_?softmax).*softmax",
    "norm": r"(layer|rms|batch|group|instance)_?norm",
    "matmul": r"gemm|gemv|nvjet|xmma|cutlass|splitk"
    r"|(^|::|_)(linear|matmul|(add|badd)?b?mm)|conv(olution|[123]d)|wgrad|dgrad|fprop",
    "memory copy": r"copy|memcpy|memset|clone|contiguous|(^|::)cat|::to$",
    "elementwise": r"elementwise|reduce_kernel|dropout|triton_(poi|red|per)_"
    rf"|(^|::)(_foreach_)?({'|'.join(_ELEMENTWISE.split())})(_|_?backward\d*)?$",
}
_FAMILIES = {
    name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()
}
_TENSOR_CORES = re.compile(
    r"^(?!.*(ffma|simt)).*([hsi]_?(884|1688|8816|16816|16832)|16816|hmma|wgmma"
    r"|warpgroup|tensorop|nvjet|xmma|flash_(fwd|bwd)|fmha_cutlass[fb]_b?f16)",
    re.IGNORECASE,
)

FAMILIES = (*_PATTERNS, OTHER)
"""Every family. "matmul" holds convolutions, "elementwise" reductions and dropout."""


@functools.cache
def family(name: str) -> str:
    """The family of an operator (`aten::addmm`), a kernel or torch's own annotation.

    A softmax counts as attention, a log-softmax does not. A name that tells nothing is
    "other".
    """
    for kind, pattern in _FAMILIES.items():
        if pattern.search(name):
            return kind
    return OTHER


def uses_tensor_cores(kernel: str) -> bool:
    """Whether the name of an NVIDIA kernel says so.

    It names the shape or kind of its matrix instructions (`16816`, `hmma`, `wgmma`,
    `tensorop`), or a library that is built on them (nvjet, xmma, FlashAttention). A
    kernel that does not say is not counted.
    """
    return _TENSOR_CORES.search(kernel) is not None
