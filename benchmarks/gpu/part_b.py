"""Part `part-b`: all that a machine with a GPU has to answer next, in at most nine minutes, the most important first.

Each step is a run of another part with its own limit of time, in a process of its own. When time is short, the last
ones are left out; rows are kept as they come.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.rows import ROOT
from benchmarks.gpu.shapes import LLAMA_8B

_LEAST_S = 20.0
"""A step is left out if less is left for it."""
_CHANGED = (
    "tests/executor_svc/gpu/checks", "tests/executor_svc/gpu/choices", "tests/executor_svc/gpu/exact",
    "tests/executor_svc/gpu/kernels/exact", "tests/executor_svc/gpu/test_graphs.py",
    "tests/executor_svc/gpu/test_runner.py",
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
    """The most that it may take."""


STEPS = (
    Step("do tests of what changed pass?", ("tests", "--files", *_CHANGED), 45),
    # In one process each for the limits of the hardware and for the kernels that groups share.
    Step(
        "exact beside fast, 8B decodes of 1, 4, 16, 64, 256 sequences",
        ("kernels", "--groups", "exact-products,exact-attention,steps-8b,steps-8b-exact"),
        130,
    ),
    Step("served, fast", (*_SERVED_8B, *_FEW_REQUESTS), 40),
    Step("served, exact", (*_SERVED_8B, *_FEW_REQUESTS, "--exact"), 40),
    Step(
        "8B in fp8, 1,000 requests of 1,000 and 1,000 tokens",
        (*_SERVED_8B, "--fp8", "--equal", "1000", "--only", "finished"),
        90,
    ),
    Step("heads", (*_SERVED_8B, "--features", "heads"), 45),
    Step("64 requests with structured output", (*_SERVED_8B, "--features", "grammars"), 35),
    Step("few bits, 64 to 256 rows", ("kernels", "--groups", "few-bits"), 35),
    Step("SIGKILL of an 8B executor, exact", (*_SERVED_8B, "--exact", "--features", "failover"), 60),
    Step("swaps beside the link", ("kernels", "--groups", "swaps"), 20),
)
"""The most important first: together as long as there is time."""


def run(options: argparse.Namespace) -> int:
    """Run the steps one after the other; exit codes: 0 none failed, 1 one failed."""
    began, failed = time.monotonic(), list[str]()
    for step in STEPS:
        left = options.seconds - (time.monotonic() - began)
        if left < min(_LEAST_S, step.seconds):
            print(f"== left out, {max(left, 0):.0f} s are left: {step.question}", flush=True)
            continue
        print(f"== {step.question}", flush=True)
        ended = subprocess.run(command(step, min(left, step.seconds), options), cwd=ROOT, check=False)
        if ended.returncode:
            failed.append(step.question)
    print(f"== part-b: {time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}", flush=True)
    return int(bool(failed))


def command(step: Step, seconds: float, options: argparse.Namespace) -> list[str]:
    """Return the command of a step that ends within so many seconds."""
    more = [*(["--trial"] if options.trial else []), *([] if options.out is None else ["--out", str(options.out)])]
    return [sys.executable, "-m", "benchmarks.gpu", *step.arguments, "--seconds", f"{seconds:.0f}", *more]
