"""What the cells of a table hold."""

Row = dict[str, str]


def micro(seconds: float) -> str:
    """Microseconds, to the nanosecond."""
    return f"{1e6 * seconds:.3f}".rstrip("0").rstrip(".")


def milli(seconds: float) -> str:
    """Milliseconds, to ten microseconds."""
    return f"{1e3 * seconds:.2f}"
