"""`python -m benchmarks.gpu [PART] [options]`, also `make bench-gpu`: tests, kernels and serving on a GPU.

Exit codes: 0 all passed, 1 a test or a measurement failed, 2 no GPU or wrong options.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.common.benchmark import positive, positive_number
from benchmarks.common.rows import ROOT
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, SHAPES, TINY

_MIN_CAPABILITY = (8, 0)


def gpu_problem() -> str:
    """Why nothing can run here; empty if there is a usable GPU."""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    if (capability := torch.cuda.get_device_capability(0)) < _MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, less than 8.0"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Run one part in this process, or each of them in a process of its own."""
    options = parse(arguments)
    if not options.trial and (problem := gpu_problem()):
        print(f"error: {problem}; this needs one of compute capability 8.0 or more", file=sys.stderr)
        return 2
    # Checkpoints are random: nothing is fetched.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.part is None:
        codes = [
            subprocess.run([sys.executable, "-m", "benchmarks.gpu", part, *arguments], cwd=ROOT, check=False).returncode
            for part in PARTS
            if part != PART_B
        ]
        return int(any(codes))
    if options.trial and options.part == "kernels":
        os.environ["TRITON_INTERPRET"] = "1"
    if options.part == "tests":
        from benchmarks.gpu.tests_part import run
    elif options.part == "kernels":
        from benchmarks.gpu.kernels.part import run
    elif options.part == PART_B:
        from benchmarks.gpu.part_b import run
    else:
        from benchmarks.gpu.serving.part import run
    return run(options)


T = TypeVar("T")
PARTS = {
    "tests": "the kernels' tests on compiled kernels; greedy tokens of both services beside transformers",
    "kernels": "kernels and whole steps beside references and the limits of the hardware",
    "serve": "both services under 1,000 requests at once, beside transformers' continuous batching",
    "part-b": "what is to be answered next, of all parts, nine minutes at once; not among those that run without PART",
}
PART_B = "part-b"
FEATURES = ("drafts", "heads", "adapters", "grammars", "failover", "starts")
SECONDS, PART_B_SECONDS = 510.0, 540.0
NUM_REQUESTS, NUM_PEER_REQUESTS = 1000, 200
_NUM_TRIAL_REQUESTS, _NUM_TRIAL_PEER_REQUESTS = 6, 3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check; `shapes` is a list of ModelShape, `groups` a list of names. Exits with 2 on a wrong option."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.shapes = _chosen(parser, "--shapes", options.shapes, SHAPES)
    if options.groups is not None:
        from benchmarks.gpu.kernels.part import ORDER

        names = {group.name: group.name for group in ORDER}
        options.groups = _chosen(parser, "--groups", options.groups, names)
    if options.steps is not None:
        from benchmarks.gpu.part_b import STEPS

        numbers = {str(number): number for number, _ in enumerate(STEPS, 1)}
        options.steps = _chosen(parser, "--steps", options.steps, numbers)
    if options.seconds is None:
        options.seconds = PART_B_SECONDS if options.part == PART_B else SECONDS
    if options.trial:
        options.shapes = [TINY]
        options.requests, options.peer_requests = _NUM_TRIAL_REQUESTS, _NUM_TRIAL_PEER_REQUESTS
    options.features = _chosen(parser, "--features", options.features, {each: each for each in FEATURES})
    options.no_peer |= options.fp8 or options.exact or options.only is not None or bool(options.features)
    return options


def _parser() -> argparse.ArgumentParser:
    parts = "\n".join(f"  {name:8} {text}" for name, text in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"Tests and benchmarks on a GPU. Parts:\n{parts}\nWithout PART all of them run, in this order.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=list(PARTS), metavar="PART", help="tests, kernels, serve or part-b")
    parser.add_argument(
        "--seconds", type=positive_number,
        help=f"time limit of each part (default {SECONDS:.0f}; of part-b {PART_B_SECONDS:.0f})",
    )  # fmt: skip
    default = f"{LLAMA_8B.name},{QWEN3_06B.name}"
    parser.add_argument("--shapes", default=default, help="models for whole steps and serving (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for all output; default: benchmarks/results for rows")
    parser.add_argument("--trial", action="store_true", help="try this without a GPU: tiny sizes, meaningless times")

    group = parser.add_argument_group("tests")
    group.add_argument("--files", nargs="+", help="test files; default: all of the kernels' tests")
    group.add_argument("-k", default="", metavar="EXPRESSION", help="tests to run, as in pytest")
    group = parser.add_argument_group("kernels")
    group.add_argument("--groups", help="groups of measurements, separated by commas; limits are always measured")
    group = parser.add_argument_group("part-b")
    group.add_argument("--steps", help="numbers of steps, separated by commas, such as those that a run has left out")
    group = parser.add_argument_group("serve")
    group.add_argument("--requests", type=positive, default=NUM_REQUESTS, help="default %(default)s")
    group.add_argument("--peer-requests", type=positive, default=NUM_PEER_REQUESTS, help="default %(default)s")
    group.add_argument(
        "--equal", type=positive, metavar="TOKENS", help="all prompts and all outputs have so many, in place of lengths"
    )
    group.add_argument("--only", choices=("finished",), help="the first stage alone: all at once, finished results")
    group.add_argument("--no-peer", action="store_true", help="without transformers")
    group.add_argument("--fp8", action="store_true", help="linears, keys and values in fp8; without transformers")
    group.add_argument("--exact", action="store_true", help="with --numerics exact; without transformers")
    group.add_argument(
        "--features",
        metavar="NAMES",
        help=f"of {','.join(FEATURES)}: batches with each beside none, in place of all else",
    )
    return parser


def _chosen(parser: argparse.ArgumentParser, option: str, text: str | None, known: dict[str, T]) -> list[T]:
    names = text.split(",") if text else []
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"{option}: there is no {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
