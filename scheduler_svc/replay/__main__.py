"""`python -m scheduler_svc.replay FILE`: repeats the calls of a plan log into the core, and compares the plans."""

from __future__ import annotations

import argparse
import sys

from cadenza_common.serving.plan_log import PlanLogError, PlanLogReader
from scheduler_svc.replay.core_replay import CoreReplay

EXIT_SAME, EXIT_DIFFERENT, EXIT_UNREADABLE = 0, 1, 2


def replay(path: str) -> int:
    """Replay the log at this path up to the first difference, and print the outcome.

    Returns the exit code; raises PlanLogError.
    """
    with PlanLogReader(path) as log:
        core = CoreReplay(log.header)
        for number, record in enumerate(log, start=1):
            found = core.make(record)
            if found:
                kind = record.WhichOneof("record")
                step = f"step {record.plan_step.plan.step_id}, " if record.plan_step.HasField("plan") else ""
                print(f"{path}: {step}record {number} ({kind}) differs:")
                print("\n".join(f"  {line}" for line in found))
                return EXIT_DIFFERENT
        if log.num_cut_bytes:
            print(f"{path}: the last record was cut off ({log.num_cut_bytes} bytes) and is left out", file=sys.stderr)
    print(
        f"{path}: {core.num_calls} calls, {core.num_plans} plans, {core.num_requests} requests, "
        f"{core.num_tokens} tokens: all plans are the same"
    )
    return EXIT_SAME


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 the same plans, 1 a difference, 2 wrong arguments or a file that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_svc.replay",
        description="Make the calls of a plan log into the scheduler's core again, and check that it makes the same "
        "plans.",
        epilog=main.__doc__,
    )
    parser.add_argument("file", metavar="FILE", help="what a scheduler has written with --record FILE")
    try:
        return replay(parser.parse_args(arguments).file)
    except PlanLogError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_UNREADABLE


if __name__ == "__main__":
    sys.exit(main())
