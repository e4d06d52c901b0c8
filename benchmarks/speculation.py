"""What do drafts gain? With an oracle on the 134.5M shape, beside what this machine's arithmetic allows; and on texts.

`default`: what `--speculative auto` costs and gives on a real file; `looks`: processor time where nothing is found.

The oracle replays a recorded run, spoiled to a stated acceptance, for random weights have nothing to guess. The texts
are the demo model's. All systems of a measure run in turns, each with its own processes; tokens must be those of the
service without drafts, or there is no row.

What drafts may gain on this machine: measured times of steps with more rows, and acceptances as given.

With a draft right with probability a, independently of the others, a step with k drafts gives (1 - a^(k+1)) / (1 - a)
tokens (Leviathan et al., arXiv 2211.17192, equation 1). It takes the time of a step with k + 1 rows for each sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import SHAPES, random_checkpoint, vocab_size
from benchmarks.common.forward_step import make_runner, step_batch
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, wait_quiet
from benchmarks.common.workload import Request, decode_workload
from benchmarks.serving import default_drafts, draft_looks, oracle, texts
from benchmarks.serving.decoding import Decoded, Served, served
from benchmarks.serving.opening import names_type
from benchmarks.serving.oracle import RecordedText, save_texts
from cadenza_launcher.services.family import Programs

NAME = "speculation"
ORACLE, TEXTS, DEFAULT, LOOKS = "oracle", "texts", "default", "looks"
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
    if LOOKS in options.measure:
        yield from draft_looks.measure(NAME, options)
    if DEFAULT in options.measure:
        yield from default_drafts.measure(NAME, options)


def _oracle(options: argparse.Namespace) -> Iterator[Row]:
    folder = random_checkpoint(options.shape)
    limits = {"max_num_seqs": _ROWS, "max_num_batched_tokens": max(_ROWS, options.batches[-1] * 17)}
    cases = [(batch, k) for batch in options.batches for k in range(MOST + 1) if batch * (1 + k) <= _ROWS]
    times = measure_steps(folder, cases, _CONTEXT, _ROUNDS, limits)
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
    os.environ |= {oracle.TEXTS: str(path), oracle.SEED: str(seed)}
    programs = Programs(executor=("-m", oracle.__name__))
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
    times: StepTimes,
    options: argparse.Namespace,
) -> Row:
    batch, acceptance = case
    best = best_num_drafts(times, batch, acceptance)
    allowed = allowed_gain(times, batch, acceptance, best)
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
        "output_tokens": _output_len(batch), "expected_tokens_per_step": tokens_per_step(acceptance, best),
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
    if params["measure"] == LOOKS:
        return draft_looks.describe(row)
    if params["measure"] == DEFAULT:
        return default_drafts.describe(row)
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
        "--measure", type=names_type((ORACLE, TEXTS, DEFAULT, LOOKS)), default=[ORACLE, TEXTS], metavar="NAMES",
        help=f"of {ORACLE},{TEXTS},{DEFAULT},{LOOKS} (default: the first two)",
    )  # fmt: skip
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m", help="of the oracle's model (default 135m)")
    parser.add_argument("--batches", type=_batches, default=[1, 4, 16, 64], help="sequences (default 1,4,16,64)")
    parser.add_argument(
        "--acceptances", type=_acceptances, default=[0.0, 0.5, 0.7, 0.9], help="of drafts (default 0,0.5,0.7,0.9)"
    )
    texts.add_options(parser)
    default_drafts.add_options(parser)


BENCHMARK = Benchmark(NAME, "what do drafts gain?", _add_options, _run, _describe)


StepTimes = Mapping[tuple[int, int], float]
"""Seconds of a step by number of sequences and of drafts for each."""


def tokens_per_step(acceptance: float, num_drafts: int) -> float:
    """Expected tokens of a sequence in a step with so many drafts."""
    return sum(acceptance**index for index in range(num_drafts + 1))


def allowed_gain(times: StepTimes, batch: int, acceptance: float, num_drafts: int) -> float:
    """Multiple of the tokens per second without drafts."""
    return tokens_per_step(acceptance, num_drafts) * times[batch, 0] / times[batch, num_drafts]


def best_num_drafts(times: StepTimes, batch: int, acceptance: float) -> int:
    """The number of drafts that allows the greatest gain; 0 if none allows any."""
    return max((k for b, k in times if b == batch), key=lambda k: allowed_gain(times, batch, acceptance, k))


def measure_steps(
    model: Path, cases: Sequence[tuple[int, int]], context: int, rounds: int, options: Mapping[str, Any]
) -> dict[tuple[int, int], float]:
    """Median seconds of a step of each case: sequences and drafts; all in turns, in this process without services.

    A step runs the model over the last token and the drafts of each sequence behind `context` tokens, with logits of
    all of them.
    """
    loaded = make_runner(model, None, more=options)
    runner = loaded.runner
    batches = {}
    for batch, num_drafts in cases:
        made = step_batch([(context, 1 + num_drafts)] * batch, loaded.layout)
        batches[batch, num_drafts] = replace(made, logits_rows=torch.arange(batch * (1 + num_drafts)))
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for index in range(rounds + 1):
        for case, batch_of in batches.items():
            start = time.perf_counter()
            runner.argmax(runner.logits(runner.forward(batch_of), batch_of.logits_rows))
            if index:  # the first round warms up
                seconds[case].append(time.perf_counter() - start)
    return {case: statistics.median(found) for case, found in seconds.items()}
