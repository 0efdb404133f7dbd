"""The kinds of findings, each in a module with `find(run)`."""

from miniddp.check import (
    data,
    gradients,
    keeping,
    order,
    randomness,
    replicas,
    speed,
)
from miniddp.check.finding import Finding, Run

KINDS = (data, order, replicas, gradients, randomness, keeping, speed)


def findings_of(run: Run) -> list[Finding]:
    """The worst first; of equals, in the order of `KINDS`."""
    findings = [finding for kind in KINDS for finding in kind.find(run)]
    return sorted(findings, key=lambda finding: finding.severity)
