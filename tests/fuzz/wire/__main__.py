"""`python -m tests.fuzz.wire --examples 20000 --seed 1`: both services under anything that can come on the wire."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.wire.run import SERVICES, fuzz

_PROGRESS = 1000


def _print_progress(num_examples: int) -> None:
    if num_examples % _PROGRESS == 0:
        print(f"{num_examples} examples", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all went well, 1 an example failed, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.wire", description="hostile messages to both services")
    parser.add_argument("--examples", type=int, default=5000, help="for each service (default 5000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--service", choices=SERVICES, nargs="*", default=list(SERVICES), help="only these")
    options = parser.parse_args(arguments)
    for service in options.service:
        began = time.monotonic()
        try:
            report = fuzz(service, options.examples, options.seed, _print_progress)
        except BaseException:
            again = f"--service {service} --seed {options.seed} --examples {options.examples}"
            print(f"FAILED: {service}\nrepeat: python -m tests.fuzz.wire {again}", flush=True)
            raise
        statuses = ", ".join(f"{count} {name}" for name, count in sorted(report.statuses.items()))
        print(
            f"ok, seed {options.seed}: {service}: {report.num_examples} examples in {time.monotonic() - began:.0f} s, "
            f"memory grew by {report.grown_bytes / 1e6:.1f} MB in the second half: {statuses}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
