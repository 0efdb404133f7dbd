"""Exercise 12: the noise scale from the ranks' gradients, and the rate.

In each step rank r has the gradient g_r of its own batch of b samples, and
their mean g over N ranks is the gradient of N * b samples. The variance of
one sample's gradient, summed over all weights, is V; the true gradient is G.
The gradient of a batch of size m has on average the squared length
|G|^2 + V / m. Two batch sizes are two equations. The noise scale is
V / |G|^2.
"""

from collections.abc import Sequence

from torch import Tensor


def noise_scale(gradients: Sequence[Sequence[Tensor]], batch_size: int) -> float:
    """The noise scale, in samples.

    `gradients[t][r]` is rank r's gradient in step t, with `batch_size`
    samples: a flat tensor. There are at least two ranks. Infinite if the
    estimate of |G|^2 is not positive.
    """
    raise NotImplementedError("exercise 12: estimate the noise scale")


def learning_rate(
    step: int,
    base_rate: float,
    base_batch: int,
    batch: int,
    warmup_steps: int,
    optimizer: str,
) -> float:
    """The rate of `step`, counted from 0.

    It rises by equal amounts from `base_rate`, tuned for `base_batch`, to
    the rate for `batch`, which it reaches at `warmup_steps` and keeps. The
    rule is the linear one for "sgd" and that of the square root for "adam".
    Any other optimizer is a ValueError that names it.
    """
    raise NotImplementedError("exercise 12: choose the learning rate")
