"""Cadenza's stages: both services as processes, called over gRPC, and the requests that the peer gets too.

Random prompts and outputs of random lengths, all at once. Of decode steps: their duration, and by a trace how long the
device waits between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.common.burst_client import generate_burst, latencies, local_services, stream_burst
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.gpu.cases import Ceilings, Goal, Metrics, device_time, read_trace
from benchmarks.gpu.environment import about_gpu
from benchmarks.gpu.serving.run import PEER_S, Run
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, ModelShape
from cadenza import AsyncClient, LocalServices, SamplingParams
from cadenza.steps.watch import StepWatch, watch_steps
from cadenza.v1 import admin_pb2
from cadenza.v1.admin_pb2_grpc import ExecutorAdminServiceStub
from cadenza_common.wire.transport import channel_options

_MAX_TRACE_BYTES = 15 << 20
START_S = 25.0
"""A start with the largest shape takes 13 to 17 s on an H100, without what it compiles and compares at first."""
_MOST_TOKENS_PER_S = 20000
"""Of output, about the limit of an H200 with keys and values in fp8."""
_OF_REQUESTS = 1000
"""Fewer requests fill no batch for long, and have no goal."""
_TOKENS_PER_S = {LLAMA_8B.name: Goal("tokens_per_s", at_least=16000)}
_IDLE = {LLAMA_8B.name: Goal("idle_percent", at_most=2), QWEN3_06B.name: Goal("idle_percent", at_most=10)}


PUBLISHED = {"H100": 15220, "H200": 17744}
"""Output tokens per second of TensorRT-LLM with Llama-3.1-8B in fp8, inputs and outputs of 1,000 tokens, as NVIDIA
publishes them; by a part of the GPU's name."""
_PUBLISHED_LENGTH = 1000


def _goal(run: Run) -> Goal | None:
    """Return the goal of tokens per second: the published ones for the same lengths in fp8, or ours for the shape."""
    sizes = {(len(each.prompt), each.output_len) for each in run.load.requests}
    if run.fp8 and run.shape is LLAMA_8B and sizes == {(_PUBLISHED_LENGTH, _PUBLISHED_LENGTH)}:
        found = (goal for gpu, goal in PUBLISHED.items() if gpu in str(about_gpu()["gpu"]))
        return next((Goal("tokens_per_s", at_least=goal) for goal in found), None)
    return _TOKENS_PER_S.get(run.shape.name) if len(run.load.requests) >= _OF_REQUESTS else None


def serve_all(run: Run, model: Path, trial: bool, with_peer: bool, only_first: bool = False) -> Metrics:
    """Run all stages; returns the metrics of the requests that the peer serves too.

    only_first: the first after the start alone, and a trace of decode steps if its goal is missed.

    Raises BenchmarkError if a service died.
    """
    load, name, seconds = run.load, run.shape.name, 0.0 if trial else 15.0
    start_s, first_s = (0.0, 0.0) if trial else (START_S, least_s(load.requests))
    # Streams come last: they are skipped if the peer would have no time left.
    peer_s = PEER_S if with_peer and not trial else 0.0
    started: list[LocalServices] = []
    with contextlib.ExitStack() as stack:
        run.stage("start", start_s, lambda: _start(run, model, stack, started))
        if not started:
            return {}
        target = started[0].target
        goal = _goal(run)
        found = run.stage(
            "all at once, finished results", first_s, lambda: _finished(run, target, load.requests), load.requests, goal
        )

        def trace() -> None:
            run.stage(
                "device between steps, torch.profiler", seconds, lambda: _decode_steps(run, started[0], traced=True),
                load.decodes, _IDLE.get(name),
            )  # fmt: skip

        if only_first:
            if goal is not None and goal.judge(found) == "missed":
                trace()
            return {}
        sample = run.stage("the peer's requests", seconds, lambda: _finished(run, target, load.sample), load.sample)
        run.stage("decode steps", seconds, lambda: _decode_steps(run, started[0], traced=False), load.decodes)
        trace()
        run.stage("all at once, a stream each", 3 * seconds + peer_s, lambda: _streamed(run, target), load.requests)
    return sample


def least_s(requests: Sequence[Request]) -> float:
    """Return the seconds that their outputs take at least on the fastest GPU that was measured."""
    return sum(each.output_len for each in requests) / _MOST_TOKENS_PER_S


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


SHORTEST, LONGEST = 100, 1024
"""Tokens of a prompt, and of an output."""


def make_requests(
    count: int, seed: int, vocab_size: int, shortest: int = SHORTEST, longest: int = LONGEST
) -> list[Request]:
    """Uniform lengths of prompts and outputs, uniform token ids; fewer requests are the first ones of more."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        length, output_len = rng.randint(shortest, longest), rng.randint(shortest, longest)
        requests.append(Request(index, [rng.randrange(vocab_size) for _ in range(length)], output_len))
    return requests


def sample_of(requests: Sequence[Request], count: int, seed: int) -> list[Request]:
    """A seeded sample in the requests' order, for a slower peer."""
    chosen = random.Random(seed + 1).sample(range(len(requests)), min(count, len(requests)))
    return [requests[index] for index in sorted(chosen)]


def equal_requests(count: int, length: int, output_len: int, seed: int, vocab_size: int) -> list[Request]:
    """Requests of one size: after all prompts are computed, each step decodes all sequences."""
    rng = random.Random(seed + 2)
    return [Request(index, [rng.randrange(vocab_size) for _ in range(length)], output_len) for index in range(count)]


def limit_s(shape: ModelShape, requests: Sequence[Request], ceilings: Ceilings) -> float:
    """Least seconds in 16 bits: all products at the measured rate, then reading all keys and values for the outputs.

    Reading the matrices is left out: with many sequences their products take longer.
    """
    flops = read_tokens = 0
    for each in requests:
        length, more = len(each.prompt), each.output_len - 1
        flops += shape.prefill_flops(1, length) + more * shape.prefill_flops(1, 1)
        read_tokens += more * length + more * (more + 1) // 2
    return flops / ceilings.matmul + read_tokens * shape.kv_bytes_per_token / ceilings.copy


_TRACED_STEPS = 40
_POLL_S = 0.02
_LAST_RECORDS_S = 5.0
_TRACE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Measurements of requests that decode together."""

    metrics: Metrics
    trace: bytes = b""
    """In Chrome's format, gzip; empty if no trace was taken."""


def decode_steps(records: Sequence[Any], num_seqs: int) -> list[Any]:
    """The step records in which all `num_seqs` sequences decode and nothing else happens."""
    return [
        record
        for record in records
        if len(record.sequence_ids) == num_seqs and all(count == 1 for count in record.num_tokens) and not record.joined
    ]


def step_metrics(records: Sequence[Any], num_seqs: int) -> Metrics:
    """Median duration of decode steps, from result to result at the scheduler."""
    steps = sorted(decode_steps(records, num_seqs), key=lambda record: record.step_id)
    gaps = [
        (after.applied_ns - before.applied_ns) / 1e6
        for before, after in zip(steps, steps[1:], strict=False)  # noqa: RUF007
        if after.step_id == before.step_id + 1
    ]
    if not gaps:
        return {}
    return {"step_ms": statistics.median(gaps), "steps": float(len(gaps))}


def trace_metrics(trace: bytes) -> Metrics:
    """Device time in a trace; the profiler slows the host, so the true idle share is no larger."""
    events = read_trace(trace)
    found, kib = device_time(events), {"trace_kib": len(trace) / 1024}
    if found is None:
        return kib
    return {
        "idle_percent": 100 * found.idle_share,
        "busy_ms": 1e3 * found.busy_s,
        "span_ms": 1e3 * found.span_s,
        **kib,
    }


async def measure_decodes(target: str, executor: str, requests: Sequence[Request], *, traced: bool) -> DecodeTimes:
    """Serve equal requests and measure their decode steps: idle share of the device if traced, else duration.

    A trace without a device, as on a CPU, gives no share. Raises BenchmarkError if no trace could be taken.
    """
    async with AsyncClient(target) as client:
        await client.model_info()
        async with watch_steps(client) as watch:
            serving = asyncio.create_task(_serve(client, requests))
            try:
                if not traced:
                    await serving
                    # The last records arrive a little after the last results.
                    await watch.wait_left(len(requests), _LAST_RECORDS_S)
                    return DecodeTimes(step_metrics(watch.records, len(requests)))
                await _all_decode(watch, len(requests), serving)
                tracing = asyncio.create_task(_trace(executor))
                await asyncio.wait((tracing, serving), return_when=asyncio.FIRST_COMPLETED)
                if not tracing.done():
                    # Too few steps were left for the trace: serve the same requests again.
                    await _serve(client, requests)
                trace = await tracing
                await serving
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
    return DecodeTimes(trace_metrics(trace), trace)


async def _serve(client: AsyncClient, requests: Sequence[Request]) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=each.output_len, ignore_eos=True, detokenize=False)
        for each in requests
    ]
    await client.generate([each.prompt for each in requests], params)


async def _all_decode(watch: StepWatch, num_seqs: int, serving: asyncio.Task[None]) -> None:
    while not decode_steps(watch.records[-4:], num_seqs):
        if serving.done():
            raise BenchmarkError("no step decoded all requests")
        await asyncio.sleep(_POLL_S)


async def _trace(executor: str) -> bytes:
    async with grpc.aio.insecure_channel(executor, options=channel_options()) as channel:
        stub: Any = ExecutorAdminServiceStub(channel)
        request = admin_pb2.ProfileRequest(num_steps=_TRACED_STEPS)
        try:
            answer = await stub.Profile(request, timeout=_TRACE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"Profile: {error.code().name}: {error.details()}") from None
    return bytes(answer.trace)
