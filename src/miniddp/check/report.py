"""What is printed: a few lines, the worst first, each finding once."""

import json
import sys
from collections.abc import Callable

from miniddp.check import (
    data,
    evaluation,
    gradients,
    keeping,
    order,
    randomness,
    replicas,
    speed,
)
from miniddp.check.finding import SEVERITIES, Finding, Run

KINDS = (
    data,
    evaluation,
    order,
    replicas,
    gradients,
    randomness,
    keeping,
    speed,
)
"""Each has a `find(run)`; of findings that are as bad, in this order."""


def tell(run: Run, as_json: bool, is_first: Callable[[str], bool]) -> bool:
    """Print what no rank has printed yet: `is_first` asks the others."""
    findings = findings_of(run)
    new = [f for f in findings if is_first(f"{f.name} {f.line}")]
    for finding in new:
        say(json.dumps(finding._asdict()) if as_json else text(finding))
    for failure in run.all_of_kind("failure"):
        if is_first("failure"):
            say(f"miniddp.check: gave up watching: {failure['error']}")
    if not as_json and is_first("summary" if findings else "silence"):
        say(f"miniddp.check: {len(findings)} found in {extent(run)}")
    return bool(new)


def findings_of(run: Run) -> list[Finding]:
    """The worst first, each but once."""
    findings: dict[str, Finding] = {}
    for kind in KINDS:
        for finding in kind.find(run):
            findings.setdefault(finding.name, finding)
    return sorted(findings.values(), key=lambda f: SEVERITIES.index(f.severity))


def text(finding: Finding) -> str:
    ranks = ", ".join(map(str, finding.ranks))
    place = f"rank {ranks}, step {finding.step}"
    return "\n".join(
        [
            f"miniddp.check: {finding.name}: {finding.text}",
            f"  where   {finding.line} ({place}); {finding.sure}",
            f"  do      {finding.remedy}",
            f"  read    {finding.page}",
        ]
    )


def extent(run: Run) -> str:
    steps = [len(run.of_kind(rank, "step")) for rank in run.ranks]
    said = f"{min(steps)} steps of {len(steps)} ranks"
    silent = [str(rank) for rank in run.ranks if not run.events[rank]]
    if silent:
        return f"{said}; no notes of rank {', '.join(silent)}"
    if not any(steps):
        return f"{said}; none of torch's optimizers has stepped"
    return said


def say(line: str) -> None:
    """Whole lines at once, so that ranks do not write into each other's."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
