"""Simulate many seeds, or one again."""

from __future__ import annotations

import argparse
import sys

from controlplane.sim.runner import run
from controlplane.sim.settings import SimSettings


def main() -> int:
    """Prints the report; 1 if anything was violated."""
    parser = argparse.ArgumentParser(prog="controlplane.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many, from 0")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--events", type=int, default=2000, help="events with faults, each seed")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--no-scenarios", action="store_true", help="leave the fixed scenarios out")
    options = parser.parse_args()
    seeds = range(options.seeds) if options.seed is None else [options.seed]
    settings = SimSettings(engines=options.engines)
    report = run(seeds, options.events, settings, scenarios=not options.no_scenarios)
    print("\n".join(report.lines()))
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
