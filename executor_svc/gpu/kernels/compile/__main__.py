"""Compiles kernels ahead of time, without a GPU: `python -m executor_svc.gpu.kernels.compile --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from executor_svc.gpu.kernels.compile.build_all import build_all, tasks_of
from executor_svc.gpu.kernels.compile.registry import RegistryError, entries


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the kernels of the command line; exit with 1 and a list of errors if any is refused."""
    parser = argparse.ArgumentParser(prog="python -m executor_svc.gpu.kernels.compile", description=__doc__)
    parser.add_argument("--module", action="append", help="full name of a module with variants; default: all modules")
    parser.add_argument("--only", default="", help="compile variants whose name contains this")
    parser.add_argument("--quick", action="store_true", help="the few that tests compile")
    parser.add_argument("--newest", action="store_true", help="for the newest GPU that each variant is for, alone")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N",
        help="the I-th of N parts, each with builds of all modules: for runs in pieces",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON on standard output")
    options = parser.parse_args(arguments)

    try:
        found = entries(options.module)
    except RegistryError as error:
        raise SystemExit(str(error)) from error
    chosen = (entry for name, entry in found.items() if options.only in name)
    part, num_parts = options.part
    tasks = tasks_of(chosen, quick=options.quick, newest=options.newest)[part - 1 :: num_parts]
    outcome = build_all(tasks, options.jobs)
    if options.json:
        print(json.dumps({"builds": [asdict(build) for build in outcome.builds], "refused": outcome.refused}))
    if outcome.refused:
        raise SystemExit(outcome.refusal)
    num_variants = len({build.name for build in outcome.builds})
    num_spilling = sum(build.spills > 0 for build in outcome.builds)
    counts = f"{num_variants} variants, {len(outcome.builds)} builds, {num_spilling} of them spill registers"
    print(f"{counts}; none refused", file=sys.stderr)


def _part(text: str) -> tuple[int, int]:
    part, num_parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= num_parts:
        raise ValueError(text)
    return part, num_parts


if __name__ == "__main__":
    main()
