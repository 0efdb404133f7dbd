"""What the sample quotes."""


def average(values: list[float], weights: list[float]) -> float:
    """The weighted mean of `values`."""
    total = sum(v * w for v, w in zip(values, weights, strict=True))
    return total / sum(weights)
