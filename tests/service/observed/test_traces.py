"""Traces of requests, from the client through the queue to the executor's steps, received by a real collector."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Tracer
from pydantic import ValidationError

from cadenza import AsyncClient, Client, SamplingParams
from cadenza_common.telemetry.otlp import Traces
from cadenza_common.telemetry.spans import DECODE_STEPS_PER_SPAN, Span
from executor_svc import app as executor_app
from executor_svc.config import ExecutorConfig
from scheduler_svc import app as scheduler_app
from scheduler_svc.config import SchedulerConfig
from tests.helpers.machine.trace_collector import Collector, collector
from tests.helpers.scheduler.scheduler_world import request
from tests.helpers.services import cadenza_services

pytestmark = pytest.mark.timeout(60)
SIZES = {
    "simulate": "instant", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_gpu_blocks": 16,
    "block_size": 8,
}  # fmt: skip
SERVER = 2  # Span.SpanKind
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
SECRET = 4321
"""A token id of prompts: no span may have it."""


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collector() as running:
        yield running


@pytest.fixture
def tracer(received: Collector) -> Iterator[Tracer]:
    """A program's own tracing."""
    provider = TracerProvider(resource=Resource({"service.name": "program"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=received.endpoint)))
    yield provider.get_tracer("program")
    provider.shutdown()


def services(received: Collector, **options: object) -> object:
    endpoint = received.endpoint
    scheduler = {"skip_tokenizer_init": True, "otlp_traces_endpoint": endpoint, "max_num_seqs": 4, **options}
    return cadenza_services("simulated", **SIZES, otlp_traces_endpoint=endpoint, scheduler=scheduler)


def num_traced(received: Collector, name: str = "llm_request") -> int:
    return len(received.named(name))


@pytest.mark.parametrize("batch", [False, True], ids=["Generate", "Session"])
async def test_a_trace_leads_from_the_client_through_the_queue_to_the_steps(
    received: Collector, tracer: Tracer, batch: bool
) -> None:
    before_ns = time.time_ns()
    async with services(received) as running, AsyncClient(running.target) as client:
        with tracer.start_as_current_span("answer a user") as own:
            if batch:
                (output,) = await client.generate([[SECRET] * 40], GREEDY)
            else:
                output = [each async for each in client.stream([SECRET] * 40, GREEDY)][-1]
        await received.wait_for(lambda: num_traced(received) == 1)
        await received.wait_for(lambda: len(received.named("step", "cadenza-executor")) >= 4)
    (client_span,) = received.named("answer a user", "program")
    (traced,) = received.named("llm_request")
    assert client_span.span_id == f"{own.get_span_context().span_id:016x}"
    assert (traced.trace_id, traced.parent_id) == (client_span.trace_id, client_span.span_id)
    assert traced.kind == SERVER
    assert before_ns < client_span.start_ns <= traced.start_ns <= traced.end_ns <= time.time_ns()
    queue, prefill, decode = received.children(traced)
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert queue.start_ns == traced.start_ns
    assert queue.end_ns == prefill.start_ns
    assert prefill.end_ns == decode.start_ns
    assert decode.end_ns == traced.end_ns
    steps = received.children(prefill)
    assert [step.attributes["cadenza.step.num_tokens"] for step in steps] == [16, 16, 8]
    by_id = {(span.trace_id, span.span_id): span for span in received.named("step", "cadenza-executor")}
    for step in steps:
        (link,) = step.links
        ran = by_id[link]
        assert ran.attributes["cadenza.step_id"] == step.attributes["cadenza.step_id"]
        assert ran.parent_id == ""
        assert ran.trace_id != traced.trace_id
    assert decode.links, "of the steps that decode, some have a span"
    for link in decode.links:
        assert by_id[link].attributes["cadenza.step_id"] % DECODE_STEPS_PER_SPAN == 0
    assert decode.attributes["cadenza.last_step_id"] == steps[-1].attributes["cadenza.step_id"] + 39
    assert output.request_id == traced.attributes["gen_ai.request.id"]
    assert [name for name, _ in traced.events] == ["first_token"]
    assert traced.events[0][1]["cadenza.step_id"] == steps[-1].attributes["cadenza.step_id"]


async def test_the_attributes_of_a_request_are_those_of_vllm(received: Collector) -> None:
    async with services(received) as running, AsyncClient(running.target) as client:
        params = SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.5, top_p=0.9, n=2)
        (output,) = await client.generate([[SECRET] * 9], params)
        await received.wait_for(lambda: num_traced(received) == 1)
    (traced,) = received.named("llm_request")
    assert traced.parent_id == "", "the program traces nothing"
    found = traced.attributes
    times = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert found == {
        "gen_ai.request.id": output.request_id, "gen_ai.request.n": 2, "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": pytest.approx(0.9),
        "gen_ai.response.model": "simulated", "gen_ai.response.finish_reasons": ["max_tokens", "max_tokens"],
        "gen_ai.usage.prompt_tokens": 9, "gen_ai.usage.input_tokens": 9, "gen_ai.usage.completion_tokens": 14,
        "gen_ai.usage.output_tokens": 14, "gen_ai.usage.num_sequences": 2, "cadenza.usage.cached_tokens": 0,
        "cadenza.num_preemptions": 0,
    }  # fmt: skip
    metrics = output.metrics
    assert metrics is not None
    assert times.pop("gen_ai.latency.e2e") == pytest.approx(metrics.total_s)
    assert times.pop("gen_ai.latency.time_in_queue") == pytest.approx(metrics.queue_s)
    assert times.pop("gen_ai.latency.time_to_first_token") == pytest.approx(metrics.first_token_s)
    inference = times.pop("gen_ai.latency.time_in_model_inference")
    assert times.pop("gen_ai.latency.time_in_model_prefill") + times.pop("gen_ai.latency.time_in_model_decode") == (
        pytest.approx(inference)
    )
    assert times == {}


async def test_preempted_requests_have_the_time_and_the_step(received: Collector) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    async with services(received, enable_prefix_caching=False) as running, AsyncClient(running.target) as client:
        outputs = await client.generate([[1 + number] * 20 for number in range(4)], params)
        await received.wait_for(lambda: num_traced(received) == 4)
    preempted = [output for output in outputs if output.metrics is not None and output.metrics.num_preemptions]
    assert preempted, "the pool is too small for all four"
    for output in preempted:
        (traced,) = (s for s in received.named("llm_request") if s.attributes["gen_ai.request.id"] == output.request_id)
        count = output.metrics.num_preemptions
        names = [name for name, _ in traced.events]
        assert traced.attributes["cadenza.num_preemptions"] == names.count("preempted") == names.count("resumed")
        assert count == names.count("preempted")
        assert all(about["cadenza.step_id"] > 0 for name, about in traced.events)
        inner = [child for phase in received.children(traced) for child in received.children(phase)]
        away = [span for span in inner if span.name == "preempted"]
        assert len(away) == count
        assert all(traced.start_ns < span.start_ns < span.end_ns < traced.end_ns for span in away)


async def test_a_blocking_client_and_metadata_name_the_callers_span(received: Collector, tracer: Tracer) -> None:
    async with services(received) as running:

        def call() -> str:
            with Client(running.target) as client, tracer.start_as_current_span("blocking") as span:
                client.generate([[5, 6]], SamplingParams(max_tokens=2))
                return f"{span.get_span_context().span_id:016x}"

        span_id = await asyncio.to_thread(call)
        await received.wait_for(lambda: num_traced(received) == 1)
        assert received.named("llm_request")[0].parent_id == span_id
        mine = ("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"), ("tracestate", "vendor=1")
        other = "00-" + "c" * 32 + "-" + "d" * 16 + "-01"
        unsampled = "00-" + "e" * 32 + "-" + "f" * 16 + "-00"
        stub = running.generation
        for metadata, traceparent in ((mine, ""), (mine, other), ((), unsampled), ((), "nonsense")):
            message = request(ids=[5] * 4, traceparent=traceparent)
            async for _ in stub.Generate(message, metadata=metadata):
                pass
        await received.wait_for(lambda: num_traced(received) == 4)
    by_metadata, by_field, malformed = received.named("llm_request")[1:]
    assert (by_metadata.trace_id, by_metadata.parent_id, by_metadata.tracestate) == ("a" * 32, "b" * 16, "vendor=1")
    assert (by_field.trace_id, by_field.parent_id, by_field.tracestate) == ("c" * 32, "d" * 16, "")
    assert malformed.parent_id == ""


async def test_a_collector_that_is_not_there_costs_one_warning_and_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    caplog.set_level("INFO", "cadenza_common.telemetry.otlp")
    with collector() as gone:
        endpoint = gone.endpoint
    traces = Traces(endpoint, "test", version="1", instance="1")
    queue = traces._provider._active_span_processor._span_processors[0]._batch_processor._queue
    for number in range(1000):
        traces.emit(Span("s", 1, 2, {"number": number}))
        assert len(queue) <= 16
    await asyncio.to_thread(traces.flush)
    await asyncio.to_thread(traces.flush)
    assert [record.message for record in caplog.records] == [
        f"spans cannot be sent to {endpoint}: they are lost until they can; requests go on"
    ]
    with collector(endpoint.removeprefix("http://")) as back:
        while len(caplog.records) < 2:  # until the channel has tried again, these are lost too
            traces.emit(Span("last", 1, 2))
            await asyncio.to_thread(traces.flush)
    await asyncio.to_thread(traces.close)
    assert f"spans are sent to {endpoint} again; at least " in caplog.records[-1].message
    assert {span.name for span in back.spans} == {"last"}


async def test_without_a_collector_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with collector() as gone:
        pass
    async with services(gone) as running, AsyncClient(running.target) as client:
        outputs = await client.generate([[5] * 9] * 20, SamplingParams(max_tokens=4, ignore_eos=True))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 20


async def test_without_the_extra_the_option_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    lines: list[str] = []
    endpoint = "http://127.0.0.1:4317"
    scheduler = SchedulerConfig(listen="127.0.0.1:0", otlp_traces_endpoint=endpoint)
    assert await scheduler_app.serve(scheduler, lines.append) == 1
    executor = ExecutorConfig(
        model="simulated", simulate="instant", listen="127.0.0.1:0", otlp_traces_endpoint=endpoint
    )
    assert await executor_app.serve(executor, lines.append) == (1, True)
    assert len(lines) == 2
    assert all("--otlp-traces-endpoint needs the extra otel" in line and "[otel]" in line for line in lines)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://localhost:4318/v1/traces"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="must be http://HOST:PORT or https://HOST:PORT"):
        SchedulerConfig(otlp_traces_endpoint=endpoint)


def test_a_program_without_a_span_does_not_import_opentelemetry() -> None:
    program = """
import sys, cadenza
from cadenza.calls import convert
from cadenza.prompts import parse_prompt
request = convert.request_to_proto("id", parse_prompt([5]), cadenza.SamplingParams(), final_only=True)
assert request.traceparent == ""
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


async def test_no_span_has_a_prompt_or_an_output(received: Collector, tokenizer_folder: str) -> None:
    marker = "marker-7f3a"
    scheduler = {"tokenizer": tokenizer_folder, "otlp_traces_endpoint": received.endpoint}
    async with (
        cadenza_services("simulated", **SIZES, otlp_traces_endpoint=received.endpoint, scheduler=scheduler) as running,
        AsyncClient(running.target) as client,
    ):
        (output,) = await client.generate([marker], SamplingParams(max_tokens=12, ignore_eos=True, stop=[marker]))
        await received.wait_for(lambda: num_traced(received) == 1)
        await received.wait_for(lambda: len(received.named("step", "cadenza-executor")) >= 1)
    assert marker.encode() not in received.raw
    assert output.request_id.encode() in received.raw
    numbers = {value for span in received.spans for value in span.attributes.values() if isinstance(value, int)}
    assert not numbers & set(output.outputs[0].token_ids) - {0, 1, *range(64)}, json.dumps(sorted(numbers))
