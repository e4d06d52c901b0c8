"""`python -m tests.simulation --seed N --trace` repeats a history; `--histories N --seed S` runs many, on all cores."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.history import HistoryError, run_history
from tests.simulation.many import run_many, summary


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all promises were kept, 1 one was broken, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the history, or of the first of them (default 0)")
    parser.add_argument("--histories", type=int, help="run so many, from this seed on; without it, one")
    parser.add_argument("--trace", action="store_true", help="print what happens, event by event")
    parser.add_argument("--workers", type=int, help="processes (default: one for each core)")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    try:
        if options.histories is None:
            report = run_history(options.seed, trace=options.trace)
            print("\n".join(report.trace))
            reports = [report]
        else:
            reports = run_many(range(options.seed, options.seed + options.histories), options.workers)
    except HistoryError as exc:
        print("\n".join(exc.trace))
        print(f"FAILED: {exc}")
        return 1
    seconds = time.perf_counter() - begun
    print(summary(reports))
    print(f"{seconds:.1f} s, {len(reports) / seconds:.0f} histories a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
