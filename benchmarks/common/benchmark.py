"""The interface of a benchmark for `python -m benchmarks`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.common.rows import Row

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
