"""The options of `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.common.benchmark import positive, positive_number
from benchmarks.gpu.common.shapes import LLAMA_8B, QWEN3_06B, SHAPES, TINY

T = TypeVar("T")
PARTS = {
    "tests": "the kernels' tests on compiled kernels; greedy tokens of both services beside transformers",
    "kernels": "kernels and whole steps beside references and the limits of the hardware",
    "serve": "both services under 1,000 requests at once, beside transformers' continuous batching",
}
FEATURES = ("drafts", "adapters", "grammars")
SECONDS = 510.0
NUM_REQUESTS, NUM_PEER_REQUESTS = 1000, 200
_NUM_TRIAL_REQUESTS, _NUM_TRIAL_PEER_REQUESTS = 6, 3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check; `shapes` is a list of ModelShape, `groups` a list of names. Exits with 2 on a wrong option."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.shapes = _chosen(parser, "--shapes", options.shapes, SHAPES)
    if options.groups is not None:
        from benchmarks.gpu.kernels.groups import ORDER

        names = {group.name: group.name for group in ORDER}
        options.groups = _chosen(parser, "--groups", options.groups, names)
    if options.trial:
        options.shapes = [TINY]
        options.requests, options.peer_requests = _NUM_TRIAL_REQUESTS, _NUM_TRIAL_PEER_REQUESTS
    options.features = _chosen(parser, "--features", options.features, {each: each for each in FEATURES})
    options.no_peer |= options.fp8 or bool(options.features)
    return options


def _parser() -> argparse.ArgumentParser:
    parts = "\n".join(f"  {name:8} {text}" for name, text in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"Tests and benchmarks on a GPU. Parts:\n{parts}\nWithout PART all of them run, in this order.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=list(PARTS), metavar="PART", help="tests, kernels or serve")
    parser.add_argument(
        "--seconds", type=positive_number, default=SECONDS, help="time limit of each part (default %(default)s)"
    )
    default = f"{LLAMA_8B.name},{QWEN3_06B.name}"
    parser.add_argument("--shapes", default=default, help="models for whole steps and serving (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for all output; default: benchmarks/results for rows")
    parser.add_argument("--trial", action="store_true", help="try this without a GPU: tiny sizes, meaningless times")

    group = parser.add_argument_group("tests")
    group.add_argument("--files", nargs="+", help="test files; default: all of the kernels' tests")
    group.add_argument("-k", default="", metavar="EXPRESSION", help="tests to run, as in pytest")
    group = parser.add_argument_group("kernels")
    group.add_argument("--groups", help="groups of measurements, separated by commas; limits are always measured")
    group = parser.add_argument_group("serve")
    group.add_argument("--requests", type=positive, default=NUM_REQUESTS, help="default %(default)s")
    group.add_argument("--peer-requests", type=positive, default=NUM_PEER_REQUESTS, help="default %(default)s")
    group.add_argument("--no-peer", action="store_true", help="without transformers")
    group.add_argument("--fp8", action="store_true", help="linears, keys and values in fp8; without transformers")
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
