"""`python -m benchmarks.experiments [--only N,…] [--place simulate|cpu]`: run experiments, then regenerate the page.

All experiments, in the order of the page.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.common.benchmark import progress
from benchmarks.experiments import (
    chunked_prefill,
    memory,
    pipelining,
    poisson,
    preemption,
    served_ratio,
    sharing,
    speculation,
    variance,
)
from benchmarks.experiments.experiment import Experiment, Place, RunSettings, save
from benchmarks.experiments.page import write_page

SEED = 20261122
PLACES: tuple[Place, ...] = ("simulate", "cpu")


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 success, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments", description=__doc__)
    parser.add_argument("--only", type=_chosen, default=list(EXPERIMENTS), metavar="N,…", help="numbers or names")
    parser.add_argument(
        "--place", choices=PLACES, help="run only there (default: everywhere that an experiment supports)"
    )
    parser.add_argument("--seed", type=int, default=SEED, help=f"seed of everything random (default {SEED})")
    parser.add_argument(
        "--page", action="store_true", help="run nothing: make docs/experiments.md from existing results"
    )
    options = parser.parse_args(arguments)
    for experiment in [] if options.page else options.only:
        for place in experiment.places:
            if options.place in (None, place):
                _run(experiment, RunSettings(place, options.seed))
    progress(f"written: {write_page(EXPERIMENTS)}")
    return 0


def _run(experiment: Experiment, settings: RunSettings) -> None:
    progress(f"{experiment.name} on {settings.place}: {experiment.title}")
    began = time.perf_counter()
    result = experiment.run(settings)
    result = result.model_copy(update={"wall_s": round(time.perf_counter() - began, 1)})
    for finding in result.findings:
        progress(f"  {'holds' if finding.held else 'does not hold'}: {finding.evidence}")
    progress(f"  {result.wall_s:.0f} s, {save(result)}")


def _chosen(text: str) -> list[Experiment]:
    found = []
    for part in text.split(","):
        matches = [each for each in EXPERIMENTS if part in (each.name, each.name.partition("-")[0])]
        if not matches:
            raise argparse.ArgumentTypeError(
                f"there is no experiment {part!r}: {', '.join(e.name for e in EXPERIMENTS)}"
            )
        found += matches
    return found


EXPERIMENTS: tuple[Experiment, ...] = tuple(
    module.EXPERIMENT
    for module in (
        variance,
        poisson,
        memory,
        sharing,
        chunked_prefill,
        preemption,
        served_ratio,
        pipelining,
        speculation,
    )
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
