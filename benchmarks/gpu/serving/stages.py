"""Cadenza's stages: both services as processes, called over gRPC."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.burst_client import generate_burst, latencies, local_services, stream_burst
from benchmarks.common.workload import Request
from benchmarks.gpu.common.cases import Goal, Metrics
from benchmarks.gpu.common.shapes import LLAMA_8B, QWEN3_06B
from benchmarks.gpu.serving.decodes import measure_decodes
from benchmarks.gpu.serving.load import limit_s
from benchmarks.gpu.serving.peer import PEER_S
from benchmarks.gpu.serving.run import Run
from cadenza import LocalServices

_MAX_TRACE_BYTES = 15 << 20
_TOKENS_PER_S = {LLAMA_8B.name: Goal("tokens_per_s", at_least=16000)}
_IDLE = {LLAMA_8B.name: Goal("idle_percent", at_most=2), QWEN3_06B.name: Goal("idle_percent", at_most=10)}


def serve_all(run: Run, model: Path, trial: bool, with_peer: bool) -> Metrics:
    """Run all stages; returns the metrics of the requests that the peer serves too.

    Raises BenchmarkError if a service died.
    """
    load, name, seconds = run.load, run.shape.name, 0.0 if trial else 15.0
    # Streams come last: they are skipped if the peer would have no time left.
    peer_s = PEER_S if with_peer and not trial else 0.0
    started: list[LocalServices] = []
    with contextlib.ExitStack() as stack:
        run.stage("start", 4 * seconds, lambda: _start(run, model, stack, started))
        if not started:
            return {}
        target = started[0].target
        run.stage(
            "all at once, finished results", 2 * seconds, lambda: _finished(run, target, load.requests), load.requests,
            _TOKENS_PER_S.get(name),
        )  # fmt: skip
        sample = run.stage("the peer's requests", seconds, lambda: _finished(run, target, load.sample), load.sample)
        run.stage("decode steps", seconds, lambda: _decode_steps(run, started[0], traced=False), load.decodes)
        run.stage(
            "device between steps, torch.profiler", seconds, lambda: _decode_steps(run, started[0], traced=True),
            load.decodes, _IDLE.get(name),
        )  # fmt: skip
        run.stage("all at once, a stream each", 3 * seconds + peer_s, lambda: _streamed(run, target), load.requests)
    return sample


def _start(run: Run, model: Path, stack: contextlib.ExitStack, started: list[LocalServices]) -> Metrics:
    began = time.monotonic()
    services = stack.enter_context(services_of(run, model))
    metrics = {"start_s": time.monotonic() - began}
    run.limited(generate_burst(services.target, run.load.warm_up))
    started.append(services)
    return metrics


@contextlib.contextmanager
def services_of(run: Run, model: Path) -> Iterator[LocalServices]:
    """Both services on this shape; their logs go to a file."""
    with (
        (run.output.files / "services.log").open("a", encoding="utf-8") as log,
        local_services(
            model,
            on_log=lambda service, line: print(service, line, file=log, flush=True),
            start_timeout_s=max(1.0, run.end_at - time.monotonic()),
            **run.options(),
        ) as services,
    ):
        yield services


def _finished(run: Run, target: str, requests: Sequence[Request]) -> Metrics:
    """One session for all requests, which returns finished results."""
    _, wall_s = run.limited(generate_burst(target, requests))
    num_tokens = sum(each.output_len for each in requests)
    found = {"tokens_per_s": num_tokens / wall_s, "requests_per_s": len(requests) / wall_s, "wall_s": wall_s}
    if run.fp8:
        return found
    least_s = limit_s(run.shape, requests, run.ceilings)
    return {**found, "limit_tokens_per_s": num_tokens / least_s, "percent_of_limit": 100 * least_s / wall_s}


def _streamed(run: Run, target: str) -> Metrics:
    """A stream for each request, timed by the client's clock."""
    times, wall_s = run.limited(stream_burst(target, run.load.requests))
    num_tokens = sum(each.output_len for each in run.load.requests)
    return {"tokens_per_s": num_tokens / wall_s, "wall_s": wall_s, **latencies(times)}


def _decode_steps(run: Run, services: LocalServices, *, traced: bool) -> Metrics:
    executor = services.addresses["executor"]
    measured = run.limited(measure_decodes(services.target, executor, run.load.decodes, traced=traced))
    if 0 < len(measured.trace) <= _MAX_TRACE_BYTES:
        (run.output.files / f"trace-{run.shape.name}.json.gz").write_bytes(measured.trace)
    return dict(measured.metrics)
