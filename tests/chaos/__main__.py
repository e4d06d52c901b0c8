"""`python -m tests.chaos --faults 300 --seed 7`: faults under load; `--replay HISTORY` repeats those of a history.

Exit codes: 0 all promises were kept, 1 one was broken (the history is kept), 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.common.rows import OtherLoad, append_row, make_row
from tests.chaos.history import read_schedule
from tests.chaos.run import Report, RunOptions, params, run_chaos
from tests.chaos.schedule import draw_schedule

_HOUR_S = 3600.0


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="so many (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of faults and load (default 1)")
    parser.add_argument("--executor", choices=("simulated", "cpu"), default="simulated", help="cpu: a tiny real model")
    parser.add_argument("--executors", type=int, default=1, choices=range(1, 9), metavar="1..8", help="default 1")
    parser.add_argument("--seconds", type=float, default=_HOUR_S, help="no fault begins later (default 3600)")
    parser.add_argument("--out", type=Path, help="empty folder for history and files (default: a temporary one)")
    parser.add_argument("--replay", type=Path, help="repeat the faults and the load of this history")
    parser.add_argument("--record", action="store_true", help="add a row to benchmarks/results/chaos.jsonl")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        try:
            repeated, schedule = read_schedule(options.replay)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            parser.error(f"--replay: {exc}")
        options.seed, options.executor = repeated["seed"], repeated["executor"]
        options.executors = repeated.get("num_executors", 1)
    else:
        schedule = draw_schedule(
            options.seed, options.faults, simulated=options.executor == "simulated", num_executors=options.executors
        )
    folder = options.out or Path(tempfile.mkdtemp(prefix="cadenza-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    # As Ctrl-C does: services are stopped, and the journal's disk is unmounted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = RunOptions(options.seed, options.executor, options.seconds, options.executors)
    with OtherLoad() as other:
        report = asyncio.run(run_chaos(folder, schedule, run))
    _print(report, run)
    if options.record:
        row = make_row(
            "chaos",
            seed=options.seed,
            params=params(run, report),
            repeats=[_metrics(report)],
            other_cores=[other.cores],
        )
        print(f"row added to {append_row(row)}")
    if report.violations:
        print(f"the history is {folder / 'history.jsonl'}: make chaos REPLAY={folder / 'history.jsonl'} repeats it")
        return 1
    if options.out is None:
        shutil.rmtree(folder)
    return 0


def _metrics(report: Report) -> dict[str, float]:
    names = ("requests", "tokens")
    counts = {name: report.counts.get(name, 0) for name in names}
    return {
        "faults": report.num_faults,
        "seconds_s": round(report.seconds, 1),
        **counts,
        "violations": len(report.violations),
        **report.figures,
    }


def _print(report: Report, options: RunOptions) -> None:
    what = "1 executor" if options.num_executors == 1 else f"{options.num_executors} executors"
    print(f"{report.num_faults} faults in {report.seconds:.0f} s, {what}, {options.executor}")
    for title, values in (("faults", report.by_kind), ("requests", report.counts), ("figures", report.figures)):
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name:36} {value}")
    print(f"{len(report.violations)} violations")
    for text in report.violations:
        print(f"  {text}")


if __name__ == "__main__":
    sys.exit(main())
