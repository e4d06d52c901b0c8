"""What do drafts gain? With an oracle on the 134.5M shape, beside what this machine's arithmetic allows; and on texts.

The oracle replays a recorded run, spoiled to a stated acceptance, for random weights have nothing to guess. The texts
are the demo model's. All systems of a measure run in turns, each with its own processes; tokens must be those of the
service without drafts, or there is no row.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import SHAPES, random_checkpoint, vocab_size
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.workload import Request, decode_workload
from benchmarks.serving.opening import names_type
from benchmarks.speculative import arithmetic, oracle_executor, texts
from benchmarks.speculative.decoding import Decoded, Served, served
from benchmarks.speculative.oracle import RecordedText, save_texts
from cadenza_launcher.services.family import Programs

NAME = "speculation"
ORACLE, TEXTS = "oracle", "texts"
MOST = 7
"""Drafts of a sequence in one step."""
_CONTEXT = 96
_OUTPUT, _OUTPUT_OF_MANY = 160, 40
"""Output tokens of each sequence, of fewer than 16 and of 16 or more."""
_ROWS = 512
_ROUNDS = 9


def _run(options: argparse.Namespace) -> Iterator[Row]:
    wait_quiet(options.quiet_wait_s)
    if ORACLE in options.measure:
        yield from _oracle(options)
    if TEXTS in options.measure:
        yield from texts.measure(NAME, options)


def _oracle(options: argparse.Namespace) -> Iterator[Row]:
    folder = random_checkpoint(options.shape)
    limits = {"max_num_seqs": _ROWS, "max_num_batched_tokens": max(_ROWS, options.batches[-1] * 17)}
    cases = [(batch, k) for batch in options.batches for k in range(MOST + 1) if batch * (1 + k) <= _ROWS]
    times = arithmetic.measure_steps(folder, cases, _CONTEXT, _ROUNDS, limits)
    progress(f"{NAME}: steps in ms: " + ", ".join(f"{b}x{1 + k} {1e3 * s:.1f}" for (b, k), s in times.items()))
    service = {**limits, "max_model_len": 1024, "num_gpu_blocks": 1200, "enable_prefix_caching": False}
    with contextlib.ExitStack() as stack:
        off = stack.enter_context(served(folder, **service))
        recorded = {
            (batch, acceptance): _record(off, folder, batch, options.seed + 100 * index)
            for index, (batch, acceptance) in enumerate(
                (batch, acceptance) for batch in options.batches for acceptance in options.acceptances
            )
        }
        texts_of = [
            RecordedText(request.prompt, tokens, acceptance)
            for (_, acceptance), (requests, outputs) in recorded.items()
            for request, tokens in zip(requests, outputs, strict=True)
        ]
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "texts.json")
        save_texts(path, texts_of)
        fixed, auto = (
            stack.enter_context(_oracle_service(folder, path, options.seed, speculative, service))
            for speculative in ("suffix", "auto")
        )
        for (batch, acceptance), (requests, outputs) in recorded.items():
            yield _oracle_row(off, fixed, auto, requests, outputs, (batch, acceptance), times, options)


def _record(off: Served, folder: Path, batch: int, seed: int) -> tuple[list[Request], list[list[int]]]:
    requests = [
        Request(each.request_id, each.prompt, _output_len(batch))
        for each in decode_workload(batch, seed, vocab_size(folder))
    ]
    return requests, off.decode(requests).tokens


def _output_len(batch: int) -> int:
    return _OUTPUT if batch < 16 else _OUTPUT_OF_MANY


@contextlib.contextmanager
def _oracle_service(folder: Path, path: Path, seed: int, speculative: str, service: dict[str, Any]) -> Iterator[Served]:
    """Services whose executor has the oracle; `suffix` stands for a fixed number of drafts, that of each request."""
    os.environ |= {oracle_executor.TEXTS: str(path), oracle_executor.SEED: str(seed)}
    programs = Programs(executor=("-m", oracle_executor.__name__))
    options = {"speculative": speculative, "num_speculative_tokens": MOST, "programs": programs}
    with served(folder, **options, **service) as found:
        yield found


def _oracle_row(
    off: Served,
    fixed: Served,
    auto: Served,
    requests: Sequence[Request],
    outputs: list[list[int]],
    case: tuple[int, float],
    times: arithmetic.StepTimes,
    options: argparse.Namespace,
) -> Row:
    batch, acceptance = case
    best = arithmetic.best_num_drafts(times, batch, acceptance)
    allowed = arithmetic.allowed_gain(times, batch, acceptance, best)
    repeats, other_cores = [], []
    for index in range(options.repeats + 1):
        with OtherLoad() as other:
            runs = {"off": off.decode(requests), "fixed": fixed.decode(requests, best), "auto": auto.decode(requests)}
        for name, run in runs.items():
            if run.tokens != outputs:
                raise BenchmarkError(f"batch {batch}, acceptance {acceptance}: tokens of {name} are not those of off")
        if not index:  # warms up, and auto finds its number
            continue
        repeats.append(_figures(runs, allowed, batch))
        other_cores.append(other.cores)
    params = {
        "measure": ORACLE, "shape": options.shape, "batch": batch, "acceptance": acceptance, "num_drafts": best,
        "output_tokens": _output_len(batch), "expected_tokens_per_step": arithmetic.tokens_per_step(acceptance, best),
        "step_ms": 1e3 * times[batch, 0], "step_with_drafts_ms": 1e3 * times[batch, best],
    }  # fmt: skip
    return make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _figures(runs: dict[str, Decoded], allowed: float, batch: int) -> dict[str, float]:
    off = runs["off"].tokens_per_s
    found = {"off_tokens_per_s": off, "allowed_gain": allowed}
    for name in ("fixed", "auto"):
        gain = runs[name].tokens_per_s / off
        found |= {
            f"{name}_tokens_per_s": runs[name].tokens_per_s,
            f"{name}_gain": gain,
            f"{name}_share_of_allowed": gain / allowed,
            f"{name}_tokens_per_step": runs[name].tokens_per_step,
        }
    return found


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    if params["measure"] == TEXTS:
        return texts.describe(row)
    return (
        f"{params['shape']}, batch {params['batch']}, acceptance {params['acceptance']}: "
        f"{params['num_drafts']} drafts allow {found['allowed_gain']:.2f}x; measured {found['fixed_gain']:.2f}x "
        f"({found['fixed_share_of_allowed']:.0%}), with auto {found['auto_gain']:.2f}x "
        f"({found['auto_share_of_allowed']:.0%}); {found['fixed_tokens_per_step']:.2f} and "
        f"{found['auto_tokens_per_step']:.2f} tokens a step; off {found['off_tokens_per_s']:.0f} tokens/s"
    )


def _acceptances(text: str) -> list[float]:
    found = [float(each) for each in text.split(",")]
    if not all(0 <= each <= 1 for each in found):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 1, not {text!r}")
    return found


def _batches(text: str) -> list[int]:
    return sorted(positive(each) for each in text.split(","))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure", type=names_type((ORACLE, TEXTS)), default=[ORACLE, TEXTS], metavar="NAMES",
        help=f"of {ORACLE},{TEXTS} (default: both)",
    )  # fmt: skip
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m", help="of the oracle's model (default 135m)")
    parser.add_argument("--batches", type=_batches, default=[1, 4, 16, 64], help="sequences (default 1,4,16,64)")
    parser.add_argument(
        "--acceptances", type=_acceptances, default=[0.0, 0.5, 0.7, 0.9], help="of drafts (default 0,0.5,0.7,0.9)"
    )
    texts.add_options(parser)


BENCHMARK = Benchmark(NAME, "what do drafts gain?", _add_options, _run, _describe)
