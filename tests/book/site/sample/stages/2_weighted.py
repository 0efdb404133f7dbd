"""The mean of what this process has, by weight."""


def mean(values, weights):
    """Each value counts as often as its weight says."""
    both = list(zip(values, weights, strict=True))
    weight = sum(weights)
    return sum(value * times for value, times in both) / (weight or len(values))


print(mean([1, 2, 3], [1, 1, 2]))
