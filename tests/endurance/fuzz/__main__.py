"""Run programs on both classes and in one process: `make fuzz`.

    python -m tests.endurance.fuzz --programs 10000 --seed 7 --minutes 60

The exit code is 1 if something is found; each find is a file in `--output`.
"""

import argparse
import random
import sys
from pathlib import Path
from time import monotonic

from .campaign import Campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--output", type=Path, default=Path("_found"))
    parser.add_argument("--features", action="store_true", help="count what was reached")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    campaign = Campaign()
    first = options.seed * 100_000
    seeds = range(first, first + options.programs)
    begin = monotonic()
    try:
        campaign.run(seeds, begin + 60 * options.minutes, lambda line: print(line, flush=True))
    finally:
        campaign.stop()
    for title, counts in (
        ("features", campaign.features),
        ("refusals", campaign.refusals),
        ("known differences", campaign.known),
        ("verdicts", campaign.verdicts),
    ):
        if title != "features" or options.features:
            print(f"\n{title}")
            for name, count in counts.most_common():
                print(f"{count:7d}  {name}")
    for file in campaign.write(options.output) if campaign.failures else ():
        print(f"found: {file}")
    for key, failure in campaign.failures.items():
        print(f"{failure.programs:7d}  {key}")
    total = sum(campaign.verdicts.values())
    minutes = (monotonic() - begin) / 60
    kinds = len(campaign.failures)
    print(f"fuzz: {total} programs in {minutes:.1f} minutes, {kinds} kinds of failures")
    return 1 if campaign.failures else 0


sys.exit(main())
