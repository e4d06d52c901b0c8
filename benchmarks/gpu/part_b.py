"""Part `part-b`: all that a machine with a GPU has to answer next, the most important first, in runs of nine minutes.

Each step is a run of another part with its own limit of time, in a process of its own. A step that has not enough time
left is named and left out; a second run with `--steps` has those. Rows are kept as they come.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.limited import run_until
from benchmarks.gpu.shapes import LLAMA_8B

_LATE_S, _GRACE_S = 10.0, 5.0
"""A step that still runs so long after its limit is interrupted, and later killed: it would take the others' time."""
_CHANGED = (
    "tests/executor_svc/gpu/checks", "tests/executor_svc/gpu/choices", "tests/executor_svc/gpu/exact",
    "tests/executor_svc/gpu/kernels/exact", "tests/executor_svc/gpu/test_graphs.py",
    "tests/executor_svc/gpu/test_runner.py", "tests/executor_svc/gpu/test_repeated_steps.py",
)  # fmt: skip
"""Tests of what no GPU has run."""
_FEW_REQUESTS = "--requests", "300", "--only", "finished"
_SERVED_8B = ("serve", "--shapes", LLAMA_8B.name, "--no-peer")


@dataclass(frozen=True, slots=True)
class Step:
    """One run."""

    question: str
    arguments: Sequence[str]
    seconds: float
    """The most that it may take, with 15 s to end in: parts measure until then."""
    least_s: float
    """Of less it would have no result: it is left out."""


STEPS = (
    Step("do tests of what changed pass?", ("tests", "--files", *_CHANGED), 55, 35),
    # In one process for the limits of the hardware.
    Step(
        "8B decodes of 1, 4, 16, 64, 256 sequences and prompts; exact: 64, 256 and prompts",
        ("kernels", "--groups", "steps-8b,steps-8b-exact"), 145, 65,
    ),
    Step("served, fast", (*_SERVED_8B, *_FEW_REQUESTS), 75, 65),
    Step("served, exact", (*_SERVED_8B, *_FEW_REQUESTS, "--exact"), 80, 65),
    Step(
        "8B in fp8, 1,000 requests of 1,000 and 1,000 tokens",
        (*_SERVED_8B, "--fp8", "--equal", "1000", "--only", "finished"), 135, 115,
    ),
    Step("heads", (*_SERVED_8B, "--features", "heads"), 75, 60),
    Step("64 requests with structured output", (*_SERVED_8B, "--features", "grammars"), 100, 75),
    Step("few bits, 64 to 256 rows", ("kernels", "--groups", "few-bits"), 60, 40),
    Step("SIGKILL of an 8B executor, exact", (*_SERVED_8B, "--exact", "--features", "failover"), 80, 65),
    Step("swaps and the host's tier beside the link", ("kernels", "--groups", "swaps"), 45, 35),
    Step("exact products and attention beside fast", ("kernels", "--groups", "exact-products,exact-attention"), 90, 40),
)  # fmt: skip
"""The most important first.

Limits are from rows of an H100: 8 s for the hardware's limits, 13 to 17 s for a start, with as much again for what a
first start compiles and compares. Structured output trains a tokenizer where `benchmarks/.cache` has none: 30 s.
"""


def run(options: argparse.Namespace) -> int:
    """Run the steps one after the other; exit codes: 0 none failed, 1 one failed."""
    began, failed, left_out = time.monotonic(), list[str](), list[str]()
    for number, step in enumerate(STEPS, 1):
        if options.steps is not None and number not in options.steps:
            continue
        left = options.seconds - (time.monotonic() - began)
        name = f"{number} of {len(STEPS)}: {step.question}"
        if left < step.least_s:
            left_out.append(str(number))
            print(f"== left out, {max(left, 0):.0f} s are left: {name}", flush=True)
            continue
        print(f"== {name}", flush=True)
        seconds = min(left, step.seconds)
        code = run_until(command(step, seconds, options), time.monotonic() + seconds + _LATE_S, _GRACE_S)
        if code != 0:
            failed.append(step.question if code is not None else f"{step.question} (did not end)")
    more = f"; go on with --steps {','.join(left_out)}" if left_out else ""
    print(f"== part-b: {time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}{more}", flush=True)
    return int(bool(failed))


def command(step: Step, seconds: float, options: argparse.Namespace) -> list[str]:
    """Return the command of a step that ends within so many seconds."""
    more = [*(["--trial"] if options.trial else []), *([] if options.out is None else ["--out", str(options.out)])]
    return [sys.executable, "-m", "benchmarks.gpu", *step.arguments, "--seconds", f"{seconds:.0f}", *more]
