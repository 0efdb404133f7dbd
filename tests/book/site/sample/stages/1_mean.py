"""The mean of what this process has."""


def mean(values):
    return sum(values) / len(values)


print(mean([1, 2, 3]))
