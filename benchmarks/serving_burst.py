"""How fast does Cadenza serve a burst? 64 requests at once, beside transformers' static batches in the same run.

The whole system: scheduler and executor as two processes, real gRPC, and a client in this process that measures times.
Each repeat measures Cadenza with a stream per request (the headline, TTFT and TPOT), Cadenza with one session for all
(`generate`), and transformers, one after the other, so that all of them run under the same conditions.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.burst_client import generate_burst, latencies, running_services, stream_burst
from benchmarks.common.checkpoints import DEMO_MODEL, random_checkpoint
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import Row, make_row
from benchmarks.common.serving_options import (
    about_model,
    about_workload,
    add_serving_options,
    model_folder,
    requests_of,
    service_options,
)
from benchmarks.common.workload import Request
from cadenza import Client

NAME = "serving_burst"
_WARM_UP_REQUESTS = 16
_WARM_UP_TOKENS = 16
_CHECKED_REQUESTS = 4
_CHECKED_TOKENS = 64


def measure_once(target: str, model: Any, requests: Sequence[Request], batch_size: int) -> dict[str, float]:
    """One repeat: output tokens per second of each system, their ratio, and the latencies of Cadenza's streams."""
    from benchmarks.common.static_batches import serve_static

    num_tokens = sum(request.output_len for request in requests)
    times, stream_s = asyncio.run(stream_burst(target, requests))
    _, generate_s = asyncio.run(generate_burst(target, requests))
    static_s = serve_static(model, requests, batch_size)
    return {
        "cadenza_tokens_per_s": num_tokens / stream_s,
        "cadenza_generate_tokens_per_s": num_tokens / generate_s,
        "transformers_tokens_per_s": num_tokens / static_s,
        "ratio": static_s / stream_s,
        **latencies(times),
    }


def _run(options: argparse.Namespace) -> Iterator[Row]:
    for folder in _models(options):
        yield _run_model(folder, requests_of(options, folder), options)


def _run_model(folder: Path, requests: list[Request], options: argparse.Namespace) -> Row:
    from benchmarks.common.greedy_check import check_greedy
    from benchmarks.common.static_batches import load_model, use_fastest_threads

    service = service_options(options)
    progress(f"{NAME}: {folder.name}: comparing greedy tokens in fp32")
    num_compared = check_greedy(folder, _to_check(requests), **service)
    model = load_model(folder)
    repeats, other_cores = [], []
    with running_services(folder, **service) as target:
        with Client(target) as client:
            info = client.model_info()
        wait_quiet(options.quiet_wait_s)
        threads = use_fastest_threads(model, _warm_up(requests)[: options.batch_size])
        measure_once(target, model, _warm_up(requests), options.batch_size)
        for index in range(options.repeats):
            progress(f"{NAME}: {folder.name}: repeat {index + 1} of {options.repeats}")
            with OtherLoad() as other:
                repeats.append(measure_once(target, model, requests, options.batch_size))
            other_cores.append(other.cores)
    params = {
        **about_model(folder, info),
        **about_workload(requests),
        "static_batch": options.batch_size,
        "transformers_threads": next(iter(threads)),
        "transformers_trial_s": {str(count): round(seconds, 3) for count, seconds in threads.items()},
        "options": service,
        "greedy_tokens_equal": num_compared,
    }
    return make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _models(options: argparse.Namespace) -> list[Path]:
    if options.model is None:
        return [DEMO_MODEL, random_checkpoint()]
    return [model_folder(options.model)]


def _to_check(requests: Sequence[Request]) -> list[Request]:
    few = requests[:_CHECKED_REQUESTS]
    return [replace(request, output_len=min(request.output_len, _CHECKED_TOKENS)) for request in few]


def _warm_up(requests: Sequence[Request]) -> list[Request]:
    few = requests[:_WARM_UP_REQUESTS]
    return [replace(request, output_len=min(request.output_len, _WARM_UP_TOKENS)) for request in few]


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    lines = [
        f"{params['model']} ({params['num_parameters'] / 1e6:.1f}M, {params['dtype']}): {params['requests']} requests, "
        f"{params['output_tokens']} output tokens",
        f"  Cadenza {found['cadenza_tokens_per_s']:.0f} output tokens/s (one session, no streaming: "
        f"{found['cadenza_generate_tokens_per_s']:.0f}); transformers in static batches of {params['static_batch']}: "
        f"{found['transformers_tokens_per_s']:.0f} on {params['transformers_threads']} thread(s); "
        f"ratio {found['ratio']:.2f}",
        f"  TTFT p50 {found['ttft_p50_ms']:.0f} ms, p99 {found['ttft_p99_ms']:.0f} ms",
    ]
    if "tpot_p50_ms" in found:
        lines[-1] += f"; TPOT p50 {found['tpot_p50_ms']:.1f} ms, p99 {found['tpot_p99_ms']:.1f} ms"
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder of a checkpoint (default: the demo model and a random one of 10.5M)")
    add_serving_options(parser)
    parser.add_argument("--batch-size", type=positive, default=16, help="transformers' static batches (default 16)")


BENCHMARK = Benchmark(NAME, "how fast does Cadenza serve a burst of requests?", _add_options, _run, _describe)
