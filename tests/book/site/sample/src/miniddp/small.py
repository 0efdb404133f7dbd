"""What the sample quotes."""


def average(values: list[float], weights: list[float]) -> float:
    """The weighted mean of `values`."""
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / sum(weights)
