"""Decode steps of both services: their duration, and by a trace how long the device waits between them."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.gpu.common.cases import Metrics
from benchmarks.gpu.common.trace import device_time, read_trace
from cadenza import AsyncClient, SamplingParams
from cadenza.steps.watch import StepWatch, watch_steps
from cadenza.v1 import admin_pb2
from cadenza.v1.admin_pb2_grpc import ExecutorAdminServiceStub
from cadenza_common.wire.transport import channel_options

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
