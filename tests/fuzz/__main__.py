"""`python -m tests.fuzz --steps 100000 --seed 1`: the whole core under random calls, in many configurations.

Each run has its own configuration, drawn from the seed and the run's number, so that any can be repeated alone.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from random import Random

from tests.fuzz.run import Run
from tests.fuzz.settings import AXES, draw_settings

_PROGRESS_STEPS = 10_000


class FuzzError(Exception):
    """A run has failed; the message says how to repeat it."""


def fuzz_run(seed: int, number: int, axes: tuple[str, ...] = AXES) -> Run:
    """One run with its own configuration; raises FuzzError, the cause attached."""
    rng = Random(f"{seed}/{number}")
    settings = draw_settings(rng, axes)
    run = Run(settings, rng)
    try:
        run.steps(rng.randint(100, 400))
    except Exception as error:
        without = " ".join(sorted(set(AXES) - set(axes)))
        raise FuzzError(
            f"run {number} of seed {seed} failed after step {run.num_steps}\n{settings}\n"
            f"repeat: python -m tests.fuzz --seed {seed} --run {number}" + (f" --without {without}" if without else "")
        ) from error
    return run


def summary(counts: Counter[str]) -> str:
    """All that was counted, by name."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all went well, 1 a run failed, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="random calls to the scheduler core")
    parser.add_argument("--steps", type=int, default=100_000, help="planned steps, over all runs (default 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, help="only this run of the seed")
    parser.add_argument("--keep-going", action="store_true", help="go on after a run that has failed")
    parser.add_argument("--without", nargs="*", choices=AXES, default=[], help="leave these out")
    options = parser.parse_args(arguments)
    axes = tuple(axis for axis in AXES if axis not in options.without)
    counts: Counter[str] = Counter()
    number, printed, failed = options.run or 0, 0, 0
    while True:
        try:
            run = fuzz_run(options.seed, number, axes)
            counts.update({"steps": run.num_steps, **run.counts})
        except FuzzError as error:
            traceback.print_exception(error.__cause__)
            print(f"FAILED: {error}", flush=True)
            failed += 1
        counts["runs"] += 1
        number += 1
        if (failed and not options.keep_going) or options.run is not None or counts["steps"] >= options.steps:
            break
        if counts["steps"] - printed >= _PROGRESS_STEPS:
            printed = counts["steps"]
            print(f"{printed} steps, {number} runs", flush=True)
    print(f"{f'{failed} runs failed' if failed else 'ok'}, seed {options.seed}: {summary(counts)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
