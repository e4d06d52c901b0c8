"""`python -m executor_svc.replay FILE [OPTIONS]`: runs the plans of a plan log and checks their results."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from cadenza_common.serving.plan_log import PlanLogError, PlanLogReader
from executor_svc.replay.plan_replay import PlanReplay, ReplayError

EXIT_SAME, EXIT_DIFFERENT, EXIT_UNREADABLE = 0, 1, 2


def replay(path: str, arguments: Sequence[str], executor_id: int | None = None) -> int:
    """Run the plans of one executor of the log at this path up to the first difference, and print the outcome.

    Returns the exit code; raises PlanLogError, ReplayError.
    """
    with PlanLogReader(path) as log:
        plans = PlanReplay(path, log.header.executor, arguments, executor_id)
        try:
            for record in log:
                if difference := plans.replay_record(record):
                    print(f"{path}: {difference}")
                    return EXIT_DIFFERENT
        finally:
            plans.stop()
        if executor_id is not None and not plans.num_plans:
            raise ReplayError(f"--executor: the log has no plan of executor {executor_id}")
        if log.num_cut_bytes:
            print(f"{path}: the last record was cut off ({log.num_cut_bytes} bytes) and is left out", file=sys.stderr)
    print(
        f"{path}: {plans.num_plans} plans, {plans.num_results} results, {plans.num_tokens} tokens: all results are the "
        "same"
    )
    return EXIT_SAME


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all results are the same, 1 a result differs, 2 wrong options or an unreadable file."""
    parser = argparse.ArgumentParser(
        prog="python -m executor_svc.replay",
        description="Run the plans of a plan log against an executor like the one that was recorded, and check tokens, "
        "candidates, logprobs and errors.",
        epilog=main.__doc__,
    )
    parser.add_argument("file", metavar="FILE", help="plan log that a scheduler has written with --record FILE")
    parser.add_argument(
        "options",
        metavar="OPTIONS",
        nargs=argparse.REMAINDER,
        help="options of python -m executor_svc that override the recorded ones: --model, --load-format, …",
    )
    parser.add_argument(
        "--executor",
        metavar="N",
        type=int,
        help="index of the executor whose plans run, where the scheduler had several; default: the first one",
    )
    given = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return replay(given.file, given.options, given.executor)
    except (PlanLogError, ReplayError) as exc:
        for line in str(exc).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_UNREADABLE


if __name__ == "__main__":
    sys.exit(main())
