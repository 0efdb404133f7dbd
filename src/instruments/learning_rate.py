"""More ranks make a larger batch: what that asks of the learning rate."""

from instruments.cost import check_amounts, check_counts


def linear_scaling(
    learning_rate: float, base_batch_size: int, batch_size: int
) -> float:
    """k times the batch, k times the learning rate.

    k steps of SGD on small batches and one on all of them move about as far, as long as
    the gradient changes little on the way (Goyal et al., "Accurate, Large Minibatch
    SGD", 2017).
    """
    return learning_rate * _ratio(learning_rate, base_batch_size, batch_size)


def square_root_scaling(
    learning_rate: float, base_batch_size: int, batch_size: int
) -> float:
    """k times the batch, √k times the learning rate: it keeps the variance of a step.

    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms",
    2022, derive it for Adam.
    """
    ratio = _ratio(learning_rate, base_batch_size, batch_size)
    return float(learning_rate * ratio**0.5)


def warmup(step: int, warmup_steps: int, start: float, target: float) -> float:
    """The learning rate of `step` (from 0): from `start` by equal amounts to `target`.

    The gradual warm-up of Goyal et al., 2017: `start` is the unscaled learning rate,
    `target` the scaled one, reached at step `warmup_steps` (5 epochs there) and kept
    from then on.
    """
    check_amounts(step=step, warmup_steps=warmup_steps, start=start, target=target)
    if step >= warmup_steps:
        return target
    return start + (target - start) * step / warmup_steps


def _ratio(learning_rate: float, base_batch_size: int, batch_size: int) -> float:
    check_amounts(learning_rate=learning_rate)
    check_counts(base_batch_size=base_batch_size, batch_size=batch_size)
    return batch_size / base_batch_size
