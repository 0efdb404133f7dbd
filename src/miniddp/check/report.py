"""What is printed: a few lines, the worst first, each finding once."""

import json
import sys
from collections.abc import Callable

from miniddp.check.finding import Finding, Run
from miniddp.check.kinds import findings_of


class Report:
    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.told = 0

    def tell(self, run: Run, is_first: Callable[[str], bool]) -> None:
        """Print what no rank has printed yet: `is_first` asks the others."""
        findings = findings_of(run)
        for finding in findings:
            if is_first(f"{finding.name} {finding.line}"):
                self.told += 1
                as_line = json.dumps(finding._asdict())
                say(as_line if self.as_json else as_text(finding))
        for failure in run.all_of_kind("failure"):
            if is_first("failure"):
                say(f"miniddp.check: gave up watching: {failure['error']}")
        if not self.as_json and is_first("summary" if findings else "silence"):
            say(f"miniddp.check: {len(findings)} found in {extent(run)}")


def as_text(finding: Finding) -> str:
    ranks = ", ".join(map(str, finding.ranks))
    place = f"rank {ranks}, step {finding.step}"
    return "\n".join(
        [
            f"miniddp.check: {finding.text}",
            f"  where   {finding.line} ({place}); {finding.sure}",
            f"  do      {finding.remedy}",
            f"  read    {finding.page}",
        ]
    )


def extent(run: Run) -> str:
    steps = [len(run.of_kind(rank, "step")) for rank in run.ranks]
    return f"{min(steps)} steps of {len(steps)} ranks"


def say(text: str) -> None:
    """Whole lines at once, so that ranks do not write into each other's."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
