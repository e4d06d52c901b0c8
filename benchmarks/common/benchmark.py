"""The interface of a benchmark, and one benchmark as a command: rows on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common.rows import BenchmarkError, Row, append_row
from cadenza import CadenzaError

SEED = 20261121
"""Default seed of everything random."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One question and the code that answers it."""

    name: str
    question: str
    add_options: Callable[[argparse.ArgumentParser], None]  # besides --repeats, --seed, --json, --record
    run: Callable[[argparse.Namespace], Iterator[Row]]  # raises BenchmarkError rather than yield a wrong row
    describe: Callable[[Row], str]  # a row as readable text, one line or a few
    to_json: Callable[[Row], str] = Row.to_json  # what --json prints, one line


def progress(text: str) -> None:
    """Report progress on stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """An option's value as an integer of at least 1; raises ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return value


def positive_number(text: str) -> float:
    """An option's value as a finite number over 0; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number over 0, not {text!r}")
    return value


def run_command(benchmark: Benchmark, arguments: Sequence[str]) -> int:
    """Run one benchmark. Exit codes: 0 success, 1 it failed, 2 wrong arguments."""
    options = command_parser(benchmark).parse_args(arguments)
    return 0 if run_benchmark(benchmark, options) else 1


def command_parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    """The options of one benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {benchmark.name}",
        description=benchmark.question,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_options(parser)
    benchmark.add_options(parser)
    return parser


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument(
        "--repeats", type=positive, default=5, help="repeats, of which rows hold the medians (default 5)"
    )
    parser.add_argument("--seed", type=int, default=SEED, help=f"seed of everything random (default {SEED})")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    parser.add_argument("--record", action="store_true", help="add the rows to benchmarks/results/NAME.jsonl")
    parser.add_argument(
        "--quiet-wait-s", type=_seconds, default=15.0, help="wait up to this long for a quiet machine (default 15)"
    )


def run_benchmark(benchmark: Benchmark, options: argparse.Namespace) -> bool:
    """Run one benchmark and print its rows as they are made; False if it failed, with the reason on stderr."""
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
