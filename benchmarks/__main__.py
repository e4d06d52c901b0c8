"""`python -m benchmarks [NAME] [options]`: run one benchmark, or all of them; results on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from benchmarks import (
    cpu_serving,
    exactness_cost,
    loadtest_agreement,
    loadtest_clock,
    scheduler_cost,
    serving_burst,
    simulate_fit,
    simulate_speed,
)
from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.rows import BenchmarkError, append_row
from cadenza import CadenzaError

_MODULES = (
    cpu_serving,
    exactness_cost,
    loadtest_agreement,
    loadtest_clock,
    scheduler_cost,
    serving_burst,
    simulate_fit,
    simulate_speed,
)
BENCHMARKS: dict[str, Benchmark] = {each.BENCHMARK.name: each.BENCHMARK for each in _MODULES}
SEED = 20261121
_LIST = "\n".join(f"  {each.name:16} {each.question}" for each in BENCHMARKS.values())


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 all went well, 1 a benchmark failed, 2 wrong arguments."""
    name, rest = _split_name(arguments)
    parser = _parser(name)
    if name is not None and name not in BENCHMARKS:
        parser.error(f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    options = parser.parse_args(rest)
    if options.list:
        print(_LIST)
        return 0
    chosen = list(BENCHMARKS.values()) if name is None else [BENCHMARKS[name]]
    if name is None:
        progress(f"running all benchmarks:\n{_LIST}")
    # All of them run, whether or not an earlier one fails.
    failed = [each.name for each in chosen if not _run(each, _with_defaults(each, options))]
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(benchmark: Benchmark, options: argparse.Namespace) -> bool:
    """Run one benchmark and give out its rows as they come; False if it failed, which has then been said."""
    try:
        for row in benchmark.run(options):
            print(benchmark.to_json(row) if options.json else _for_people(benchmark, row.note, benchmark.describe(row)))
            sys.stdout.flush()
            if options.record:
                progress(f"recorded in {append_row(row)}")
    except (BenchmarkError, CadenzaError) as error:
        progress(f"error: {benchmark.name}: {error}")
        return False
    except Exception:
        traceback.print_exc()
        return False
    return True


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more seconds, not {text!r}")
    return value


def _for_people(benchmark: Benchmark, note: str, text: str) -> str:
    return f"{benchmark.name}: {text}" + (f"\n  {note}" if note else "")


def _split_name(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def _parser(name: str | None) -> argparse.ArgumentParser:
    benchmark = BENCHMARKS.get(name or "")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks" + (f" {benchmark.name}" if benchmark else ""),
        usage=None if benchmark else "python -m benchmarks [NAME] [options]",
        description=benchmark.question if benchmark else "Run one benchmark, or without a name all of them.",
        epilog=None if benchmark else f"benchmarks; NAME --help shows the options of one:\n{_LIST}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="name the benchmarks and stop")
    parser.add_argument("--repeats", type=positive, default=5, help="rows hold the medians of these (default 5)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of everything that is random (default {SEED})")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    parser.add_argument("--record", action="store_true", help="add the rows to benchmarks/results/NAME.jsonl")
    parser.add_argument(
        "--quiet-wait-s", type=_seconds, default=15.0, help="wait up to this long for a quiet machine (default 15)"
    )
    if benchmark is not None:
        benchmark.add_options(parser)
    return parser


def _with_defaults(benchmark: Benchmark, options: argparse.Namespace) -> argparse.Namespace:
    """The options, completed by the defaults of a benchmark that was not named, and so could be given none."""
    defaults = _parser(benchmark.name).parse_args([])
    return argparse.Namespace(**{**vars(defaults), **vars(options)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
