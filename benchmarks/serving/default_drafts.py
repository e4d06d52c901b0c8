"""Does `--speculative auto` cost anything where nothing is right, and what does it give where texts repeat?

One service, so that both sides have the same memory and threads; two services differ by more than what is measured.
What drafts give: requests that may have drafts and such that may not take turns, each pair with the same prompts and
seeds. What they cost: steps of the same requests take turns (`turned_drafts`), since pairs differ by some percent.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import progress
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, percentile
from benchmarks.common.workload import Request, decode_workload
from benchmarks.serving import turned_drafts
from benchmarks.serving.decoding import Decoded, Served, served
from cadenza_cli.demo import pypi_files
from cadenza_common.gguf.file import read_gguf
from cadenza_launcher.services.family import Programs

_NOTHING = "random"
KINDS = (_NOTHING, "prose", "copy")
_TOKENS = {1: 96, 4: 80, 16: 48}
"""Output tokens of each request, by the number of requests; of others 48."""
_COPY_TOKENS, _NOTHING_TOKENS = 128, 800
_WORDS = 60
_HOT = 3.0
"""Temperature at which a model's tokens are about random."""
_RESAMPLES = 2000
_QUICK = 32
"""Steps of a request within which the number of drafts is to be found."""


@dataclass(frozen=True, slots=True)
class _Kind:
    requests: list[Request]
    temperature: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this measure."""
    parser.add_argument("--turns-s", type=float, default=100.0, help="seconds of each kind and batch (default 100)")
    parser.add_argument(
        "--turns", type=lambda text: text.split(","), default=list(KINDS), metavar="NAMES",
        help=f"kinds of text, of {','.join(KINDS)}: drawn at random, so that nothing repeats; prose, drawn from the "
        "model, where short phrases do; copies of a text in the prompt (default all)",
    )  # fmt: skip


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """One row for each kind of text and number of sequences."""
    path = pypi_files.smollm2()
    vocab = read_gguf(path).tensors["token_embd.weight"].shape[0]
    service = {"speculative": "auto", "max_num_seqs": max(64, 6 * max(options.batches)), "max_model_len": 1024}
    cases = [(kind, batch) for kind in options.turns for batch in options.batches]
    for _, batch in (case for case in cases if case[0] == _NOTHING):
        yield _cost_row(name, path, decode_workload(batch, options.seed, vocab), service, options)
    if pairs := [case for case in cases if case[0] != _NOTHING]:
        with served(path, **service) as both:
            for kind, batch in pairs:
                texts = _kind(kind, batch, options.seed, vocab)
                yield _row(name, both, texts, {"kind": kind, "batch": batch, "model": path.name}, options)


def describe(row: Row) -> str:
    """One line."""
    found, params = row.medians, row.params
    if params["kind"] == _NOTHING:
        return (
            f"{params['model']}, {params['batch']} sequences, tokens drawn at random: looking for drafts costs "
            f"{found['cost_percent']:.2f}% of a step ({found['cost_low']:.2f} to {found['cost_high']:.2f}, "
            f"{params['turns']} turns of {turned_drafts.TURN} steps, {params['drafts']} drafts)"
        )
    return (
        f"{params['model']}, {params['kind']}, {params['batch']} sequences: with drafts {found['gain']:.4f}x "
        f"({found['gain_low']:.4f} to {found['gain_high']:.4f}, {params['pairs']} pairs), by the median step "
        f"{found['step_gain']:.4f}x; {found['off_tokens_per_s']:.0f} tokens/s without, "
        f"{found['tokens_per_step']:.2f} tokens a step with, {found['late_gain']:.3f}x behind step {_QUICK}"
    )


def _kind(kind: str, batch: int, seed: int, vocab: int) -> _Kind:
    rng = random.Random(seed)
    if kind == "copy":
        requests = []
        for index in range(batch):
            text = [rng.randrange(300, 8000) for _ in range(_WORDS)]
            requests.append(Request(index, [*text, *text, *text[:10]], _COPY_TOKENS))
        return _Kind(requests, 0.0)
    length = _TOKENS.get(batch, 48)
    return _Kind([replace(each, output_len=length) for each in decode_workload(batch, seed, vocab)], 0.9)


def _cost_row(
    name: str, model: Path, requests: Sequence[Request], service: dict[str, Any], options: argparse.Namespace
) -> Row:
    """What drafts cost, in one service whose steps take turns."""
    longer = [replace(each, output_len=_NOTHING_TOKENS) for each in requests]
    with tempfile.TemporaryDirectory() as folder, OtherLoad() as other:
        times = Path(folder, "times.json")
        os.environ[turned_drafts.TIMES] = str(times)
        with served(model, programs=Programs(scheduler=("-m", turned_drafts.__name__)), **service) as turned:
            end, number = time.monotonic() + options.turns_s, 0
            while time.monotonic() < end:
                seed = options.seed + 1000 * number
                turned.decode(longer, temperature=_HOT, seed=seed, cache_salt=str(number))
                number += 1
        costs, drafts = turned_drafts.read_turns(times, len(requests))
    low, high = _interval([1 + cost for cost in costs], options.seed)
    found = {"cost_percent": 100 * statistics.median(costs), "cost_low": 100 * low - 100, "cost_high": 100 * high - 100}
    params = {
        "measure": "default", "kind": _NOTHING, "batch": len(requests), "model": model.name, "turns": len(costs),
        "drafts": drafts, "output_tokens": _NOTHING_TOKENS,
    }  # fmt: skip
    return make_row(name, seed=options.seed, params=params, repeats=[found], other_cores=[other.cores])


def _row(name: str, service: Served, texts: _Kind, params: dict[str, object], options: argparse.Namespace) -> Row:
    pairs: list[dict[str, float]] = []
    cores = []
    end = time.monotonic() + options.turns_s
    while time.monotonic() < end or len(pairs) < 4:
        with OtherLoad() as other:
            number = len(pairs)
            # A salt of its own, so that no text was there before.
            salt = f"{params['kind']} {params['batch']} {number}"
            pairs.append(_pair(service, texts, options.seed + 1000 * number, salt, number % 2 == 1))
        cores.append(other.cores)
    pairs = pairs[1:]  # the first warms up
    params |= {"measure": "default", "pairs": len(pairs), "output_tokens": texts.requests[0].output_len}
    low, high = _interval([pair["gain"] for pair in pairs], options.seed)
    for pair in pairs:
        pair |= {"gain_low": low, "gain_high": high}
    progress(f"{name}: {params['kind']} {params['batch']}: gains {low:.4f} to {high:.4f}")
    return make_row(name, seed=options.seed, params=params, repeats=pairs, other_cores=cores[1:])


def _pair(service: Served, texts: _Kind, seed: int, salt: str, drafts_first: bool) -> dict[str, float]:
    """Figures of the same requests with drafts and without."""
    runs: dict[bool, Decoded] = {}
    for with_drafts in (drafts_first, not drafts_first):
        runs[with_drafts] = service.decode(
            texts.requests, None if with_drafts else 0, temperature=texts.temperature, seed=seed,
            cache_salt=salt,
        )  # fmt: skip
    on, off = runs[True], runs[False]
    if on.tokens != off.tokens:
        raise BenchmarkError("tokens with drafts are not those without")
    return {
        "gain": on.tokens_per_s / off.tokens_per_s,
        "step_gain": _median_gap(off) / _median_gap(on),
        "late_gain": _late_rate(on) / _late_rate(off),
        "off_tokens_per_s": off.tokens_per_s,
        "on_tokens_per_s": on.tokens_per_s,
        "tokens_per_step": on.tokens_per_step,
        "drafts": sum(on.drafted),
        "accepted": sum(on.accepted),
    }


def _median_gap(run: Decoded) -> float:
    """Median seconds between two arrivals of the first stream."""
    times = [at for at, _ in run.arrivals[0]]
    return statistics.median(later - at for at, later in pairwise(times))


def _late_rate(run: Decoded) -> float:
    """Tokens a second of the first stream behind its first steps."""
    arrivals = run.arrivals[0]
    late = arrivals[min(_QUICK, len(arrivals) // 2) :]
    return sum(count for _, count in late[1:]) / (late[-1][0] - late[0][0])


def _interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by resampling."""
    rng = random.Random(seed)
    logs = [log(value) for value in values]
    medians = [statistics.median(rng.choices(logs, k=len(logs))) for _ in range(_RESAMPLES)]
    return exp(percentile(medians, 2.5)), exp(percentile(medians, 97.5))
