"""Bursts against both services of Cadenza over real gRPC, timed by the client's clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.rows import BenchmarkError, percentile
from benchmarks.common.workload import Request
from cadenza import AsyncClient, LocalServices, SamplingParams


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """One request; seconds since the run began."""

    first_s: float  # arrival of the first token
    last_s: float  # arrival of the last token
    num_tokens: int
    due_s: float = 0.0  # due time; the client's own lateness counts as the server's


@contextmanager
def running_services(model: Path, **options: Any) -> Iterator[str]:
    """Both services as processes on the CPU, token ids only; yields the scheduler's address.

    Raises BenchmarkError if a service died meanwhile, because the times would include a restart.
    """
    with local_services(model, **options) as services:
        yield services.target


@contextmanager
def local_services(model: Path, **options: Any) -> Iterator[LocalServices]:
    """As `running_services`, but yields the services.

    Without drafts, as the peers: greedy outputs of random weights repeat themselves, and drafts would be right.
    """
    events: list[str] = []
    settings = {"device": "cpu", "skip_tokenizer_init": True, "speculative": "off", **options}
    with LocalServices(str(model), on_event=events.append, **settings) as services:
        yield services
    if events:
        raise BenchmarkError("; ".join(events))


async def stream_burst(
    target: str, requests: Sequence[Request], arrivals: Sequence[float] | None = None
) -> tuple[list[StreamTimes], float]:
    """Send each request on its own stream, all at once or at `arrivals`, in seconds since the start.

    Returns the times of each request, and the seconds until the last has ended.
    """
    due = arrivals or [0.0] * len(requests)
    async with AsyncClient(target) as client:
        await client.model_info()  # so that the times do not include connecting
        start = time.perf_counter()
        streams = [_stream(client, request, start, due_s) for request, due_s in zip(requests, due, strict=True)]
        times = await asyncio.gather(*streams)
        return list(times), time.perf_counter() - start


async def generate_burst(
    target: str,
    requests: Sequence[Request],
    adapters: Sequence[str | None] | None = None,
    forced_token: int | None = None,
) -> tuple[list[list[int]], float]:
    """Send all requests at once over one session; returns the output tokens, and the seconds until all have ended.

    adapters: the LoRA adapter of each request, None for none; None: no request has one. forced_token: what all outputs
    consist of, by a bias.
    """
    async with AsyncClient(target) as client:
        await client.model_info()
        start = time.perf_counter()
        prompts = [request.prompt for request in requests]
        bias = None if forced_token is None else {forced_token: 100.0}
        params = [replace(_params(request), logit_bias=bias) for request in requests]
        outputs = await client.generate(prompts, params, adapter=adapters)
        wall_s = time.perf_counter() - start
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    for request, made in zip(requests, tokens, strict=True):
        _check_length(request, len(made))
    return tokens, wall_s


def latencies(times: Sequence[StreamTimes]) -> dict[str, float]:
    """p50 and p99 of TTFT and TPOT (time per output token after the first, over requests with two or more), in ms."""
    ttft = [1e3 * (each.first_s - each.due_s) for each in times]
    tpot = [1e3 * (each.last_s - each.first_s) / (each.num_tokens - 1) for each in times if each.num_tokens > 1]
    metrics = {"ttft_p50_ms": percentile(ttft, 50), "ttft_p99_ms": percentile(ttft, 99)}
    if tpot:
        metrics |= {"tpot_p50_ms": percentile(tpot, 50), "tpot_p99_ms": percentile(tpot, 99)}
    return metrics


async def _stream(client: AsyncClient, request: Request, start: float, due_s: float) -> StreamTimes:
    if due_s:
        await asyncio.sleep(due_s - (time.perf_counter() - start))
    first_s = last_s = 0.0
    num_tokens = 0
    async for delta in client.stream(request.prompt, _params(request)):
        new = sum(len(sample.token_ids) for sample in delta.outputs)
        if new:
            last_s = time.perf_counter() - start
            first_s = first_s or last_s
            num_tokens += new
    _check_length(request, num_tokens)
    return StreamTimes(first_s, last_s, num_tokens, due_s)


def _params(request: Request) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)


def _check_length(request: Request, num_tokens: int) -> None:
    if num_tokens != request.output_len:
        raise BenchmarkError(f"request {request.request_id}: {num_tokens} tokens instead of {request.output_len}")
