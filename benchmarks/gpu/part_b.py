"""Part `part-b`: all that a machine with a GPU has to answer next, the most important first, in runs of nine minutes.

Each step is a run of another part with its own limit of time, in a process of its own. A step that has not enough time
left is named and left out; further runs with `--steps` have those. Rows are kept as they come.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.benchmark import SEED
from benchmarks.gpu.environment import Output, as_line, row_of
from benchmarks.gpu.kernels.part import ROWS as KERNEL_ROWS
from benchmarks.gpu.limited import run_until
from benchmarks.gpu.part_b_beside import GROUP as PART
from benchmarks.gpu.part_b_beside import PEERS, compared, size_of
from benchmarks.gpu.serving.stages import PUBLISHED
from benchmarks.gpu.shapes import LLAMA_8B

_LATE_S, _GRACE_S = 10.0, 5.0
"""A step that still runs so long after its limit is interrupted, and later killed: it would take the others' time."""
_CHANGED = (
    "tests/executor_svc/gpu/checks", "tests/executor_svc/gpu/choices", "tests/executor_svc/gpu/exact",
    "tests/executor_svc/gpu/kernels/exact", "tests/executor_svc/gpu/graphs/test_graphs.py",
    "tests/executor_svc/gpu/runner/test_runner.py", "tests/executor_svc/gpu/graphs/test_repeated_steps.py",
)  # fmt: skip
"""Tests of what no GPU has run, and what is served by default or asked for in this part."""
_NEVER_RUN = (
    "tests/executor_svc/gpu/skinny", "tests/executor_svc/gpu/kernels/skinny", "tests/executor_svc/gpu/kernels/states",
    "tests/executor_svc/gpu/kernels/experts", "tests/executor_svc/gpu/kernels/test_latent_operations.py",
    "tests/executor_svc/gpu/kernels/test_few_bits_all_rows.py",
    "tests/executor_svc/gpu/kernels/attention/test_gluon.py",
    "tests/executor_svc/gpu/models", "tests/executor_svc/gpu/drafts/test_heads.py",
)  # fmt: skip
"""The same of the rest."""
_CHANGED_SINCE = (
    "tests/executor_svc/gpu/kernels/attention/test_attention.py",
    "tests/executor_svc/gpu/kernels/attention/test_split.py", "tests/executor_svc/gpu/kernels/slots",
    "tests/executor_svc/gpu/kernels/sampling", "tests/executor_svc/gpu/kernels/test_rope.py",
    "tests/executor_svc/gpu/kernels/test_activation.py", "tests/executor_svc/gpu/kernels/test_copy_pages.py",
    "tests/executor_svc/gpu/slots/test_slots.py", "tests/executor_svc/gpu/drafts/test_drafts.py",
)  # fmt: skip
"""Of kernels that are used by default, and that were changed since a GPU ran them: a first start compares them, too."""
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
    beside: str = ""
    """What its figures are to be held against: the limit, the goal, and a peer, where there is one."""


STEPS = (
    Step("do tests of what changed pass?", ("tests", "--files", *_CHANGED), 55, 35, "goal: none fails"),
    # In one process for the limits of the hardware.
    Step(
        "8B decodes of 1, 4, 16, 64, 256 sequences and prompts; exact: 64, 256 and prompts",
        ("kernels", "--groups", "steps-8b,steps-8b-exact"), 145, 65,
        "percent_of_limit: bytes at the copy's bandwidth, operations at the product's rate; goals of decodes 75, 80, "
        f"85, 88, 88, of exact ones nine tenths; {PEERS}",
    ),
    Step(
        "served, fast", (*_SERVED_8B, *_FEW_REQUESTS), 75, 65,
        "percent_of_limit; 1,000 requests gave 10,161 tokens/s on an H100 before",
    ),
    Step("served, exact", (*_SERVED_8B, *_FEW_REQUESTS, "--exact"), 80, 65, f"served, fast; {PEERS}"),
    Step(
        "8B in fp8, 1,000 requests of 1,000 and 1,000 tokens",
        (*_SERVED_8B, "--fp8", "--equal", "1000", "--only", "finished"), 135, 115,
        "TensorRT-LLM, as NVIDIA publishes it: "
        + ", ".join(f"{count:,} tokens/s on an {gpu}" for gpu, count in PUBLISHED.items()),
    ),
    Step("heads", (*_SERVED_8B, "--features", "heads"), 75, 60, "goal: gain_at_70 above 1 for 1 and 4 sequences"),
    Step(
        "64 requests with structured output", (*_SERVED_8B, "--features", "grammars"), 100, 75,
        "goal: ratio 1.05 or less; 1.22 on an H100 before",
    ),
    Step(
        "few bits, 64 to 256 rows", ("kernels", "--groups", "few-bits"), 60, 40,
        "bf16 by cuBLAS: goal best_speedup 1 or more; 0.97 to 1.20 with 64 rows, 0.44 to 0.49 with 256 before",
    ),
    Step(
        "SIGKILL of an 8B executor, exact", (*_SERVED_8B, "--exact", "--features", "failover"), 80, 65,
        "goals: longest_wait_s 15 or less, different_tokens 0",
    ),
    Step(
        "swaps and the host's tier beside the link", ("kernels", "--groups", "swaps"), 45, 35,
        "the link: goal percent_of_link 80 or more",
    ),
    Step(
        "exact products, cuBLASLt without a workspace, and exact attention beside fast",
        ("kernels", "--groups", "exact-products,exact-cublaslt,exact-attention"), 110, 40,
        "cuBLAS and fast attention: goal ratio 1.1 or less, with 2,048 rows and prompts 1.25; equal_percent 100",
    ),
    Step(
        "8B decodes of 1, 4, 16 sequences by fused layers, and with kernels that begin early",
        ("kernels", "--groups", "steps-8b-skinny,steps-8b-pdl"), 110, 80,
        "decodes of the same sizes above; percent_of_limit: goals 75, 80, 85",
    ),
    Step(
        "do tests of kernels that no GPU has run pass?", ("tests", "--files", *_NEVER_RUN), 110, 70, "goal: none fails",
    ),
    Step(
        "do tests of kernels that were changed pass?", ("tests", "--files", *_CHANGED_SINCE), 110, 70,
        "goal: none fails",
    ),
    Step(
        "prompts by Gluon's kernel, beside Triton's and cuDNN's", ("kernels", "--groups", "prefill"), 115, 70,
        "over_triton below 1, ratio to cuDNN 1.2 or less",
    ),
    Step("experts", ("kernels", "--groups", "experts"), 75, 40, "the memory's bandwidth: goal 70%; dense products"),
    Step(
        "latents and recurrent layers", ("kernels", "--groups", "latents,recurrences"), 90, 45,
        "the memory's bandwidth: goals 70 and 60%",
    ),
)  # fmt: skip
"""The most important first.

Limits are from rows of an H100: 8 s for the hardware's limits, 13 to 17 s for a start, with as much again for what a
first start compiles and compares. Structured output trains a tokenizer where `benchmarks/.cache` has none: 30 s.
"""


def run(options: argparse.Namespace) -> int:
    """Run the steps one after the other; exit codes: 0 none failed, 1 one failed."""
    began, failed, left_out = time.monotonic(), list[str](), list[str]()
    output = Output.of(PART, options.out, options.trial)
    before = size_of(output.rows)
    for number, step in enumerate(STEPS, 1):
        if options.steps is not None and number not in options.steps:
            continue
        left = options.seconds - (time.monotonic() - began)
        name = f"{number} of {len(STEPS)}: {step.question}"
        if left < step.least_s:
            left_out.append(str(number))
            print(f"== left out, {max(left, 0):.0f} s are left: {name}", flush=True)
            continue
        print(f"== {name}\n   beside: {step.beside}", flush=True)
        seconds = min(left, step.seconds)
        code = run_until(command(step, seconds, options), time.monotonic() + seconds + _LATE_S, _GRACE_S)
        if code != 0:
            failed.append(step.question if code is not None else f"{step.question} (did not end)")
    _say_what_exact_costs(output, before)
    more = f"; go on with --steps {','.join(left_out)}" if left_out else ""
    print(f"== part-b: {time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}{more}", flush=True)
    return int(bool(failed))


def _say_what_exact_costs(output: Output, before: Mapping[Path, int]) -> None:
    for outcome, goal in compared(output.rows, before):
        print(as_line(outcome, goal), flush=True)
        output.add(row_of(KERNEL_ROWS, outcome, SEED))


def command(step: Step, seconds: float, options: argparse.Namespace) -> list[str]:
    """Return the command of a step that ends within so many seconds."""
    more = [*(["--trial"] if options.trial else []), *([] if options.out is None else ["--out", str(options.out)])]
    return [sys.executable, "-m", "benchmarks.gpu", *step.arguments, "--seconds", f"{seconds:.0f}", *more]
