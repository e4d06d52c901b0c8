"""The spans of requests that are preempted, moved, lost, aborted and failed; on virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from cadenza_common.telemetry.spans import Span
from cadenza_common.telemetry.trace_context import TraceContext, parse_traceparent
from executor_svc.simulated.injection import Poison
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.request_trace import MAX_STEPS
from scheduler_svc.plan_loop.ports import EngineRequest
from tests.helpers.scheduler import fleet_world
from tests.helpers.scheduler.changing_executor import STEP_S
from tests.helpers.scheduler.fleet_world import fleet


@dataclass
class Sink:
    """Keeps spans."""

    spans: list[Span] = field(default_factory=list)
    parents: list[TraceContext | None] = field(default_factory=list)
    roots: list[tuple[int, int] | None] = field(default_factory=list)

    def emit(self, span: Span, parent: TraceContext | None = None, root_ids: tuple[int, int] | None = None) -> None:
        self.spans.append(span)
        self.parents.append(parent)
        self.roots.append(root_ids)

    def of(self, request_id: str) -> Span:
        (span,) = (each for each in self.spans if each.attributes["gen_ai.request.id"] == request_id)
        return span


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Sink:
    """What the engine of a fleet sends its spans to."""
    sink = Sink()

    def engine(*args: Any, **more: Any) -> Engine:
        return Engine(*args, **more, spans=sink)

    monkeypatch.setattr(fleet_world, "Engine", engine)
    return sink


def events(span: Span) -> list[str]:
    return [name for name, _, _ in span.events]


def inner(span: Span) -> list[str]:
    """The names of what is within its phases, without the steps."""
    return [child.name for phase in span.children for child in phase.children if child.name != "step"]


@pytest.mark.slow
async def test_a_moved_request_names_both_executors(sink: Sink) -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        held = [name for name in world.live if world.holder(name) == 0]
        world.executors[0].die()
        await world.run()
    moved = [name for name in held if "moved" in events(sink.of(name))]
    assert moved
    for name in moved:
        span = sink.of(name)
        assert events(span).index("executor_lost") < events(span).index("moved")
        about = next(about for event, _, about in span.events if event == "moved")
        assert (about["cadenza.from_executor"], about["cadenza.executor"]) == ("e:0", "e:1")
        assert "executor_lost" in inner(span)
        (lost,) = (each for phase in span.children for each in phase.children if each.name == "executor_lost")
        assert lost.end_ns - lost.start_ns >= 0.5e9, "it waited for its executor before it moved"
        decode = span.children[-1]
        assert decode.attributes["cadenza.executor"] == "e:1"
    assert not [name for name in world.live if name not in held and "moved" in events(sink.of(name))]


async def test_a_request_whose_session_is_opened_again_resumes(sink: Sink) -> None:
    async with fleet(1) as world:
        world.submit("a", prompt=60, max_tokens=30)
        await world.clock.advance(8.5 * STEP_S)
        world.executors[0].break_off()
        await world.run()
    assert events(sink.of("a")) == ["first_token", "executor_lost", "resumed"]
    assert inner(sink.of("a")) == ["executor_lost"]


@pytest.mark.slow
async def test_all_times_are_within_those_of_the_parent_and_on_the_wall_clock(sink: Sink) -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        world.executors[0].die()
        await world.run()
        now_ns = world.clock.wall_time_ns()
    assert len(sink.spans) == len(world.live)

    def check(span: Span) -> None:
        assert span.start_ns <= span.end_ns
        for child in span.children:
            assert span.start_ns <= child.start_ns <= child.end_ns <= span.end_ns, (span.name, child.name)
            check(child)
        for name, time_ns, _ in span.events:
            assert span.start_ns <= time_ns <= span.end_ns, name

    for name, live in world.live.items():
        span = sink.of(name)
        check(span)
        assert now_ns - 60e9 < span.start_ns
        assert span.end_ns - span.start_ns == live.times.end_ns - live.times.arrival_ns
        assert [child.name for child in span.children] == ["queue", "prefill", "decode"]


async def test_requests_that_end_early_have_the_spans_of_what_they_reached(sink: Sink) -> None:
    async with fleet(1) as world:
        world.submit("runs", prompt=12, max_tokens=60)
        for number in range(8):
            world.submit(f"waits{number}", prompt=12, max_tokens=60)
        await world.clock.advance(6.5 * STEP_S)
        for name in ("runs", "waits7"):
            world.engine.abort("", name)
        await world.run()
    assert [child.name for child in sink.of("waits7").children] == ["queue"]
    assert sink.of("waits7").attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert sink.of("waits7").error == ""
    assert [child.name for child in sink.of("runs").children] == ["queue", "prefill", "decode"]


async def test_a_failed_request_is_an_error(sink: Sink) -> None:
    async with fleet(1) as world:
        world.executors[0].poison = Poison(1, 10)
        world.executors[0].break_off()
        await world.clock.advance(1.0)
        live = world.submit("a")
        await world.run()
    assert live.samples[0].finish is not None
    assert live.samples[0].finish.detail is FinishDetail.EXECUTOR_ERROR
    assert sink.of("a").error == "executor_error"
    assert inner(sink.of("a")) == ["executor_lost"] * 3, "the fourth ended it"


async def test_a_long_prompt_keeps_a_bounded_number_of_steps(sink: Sink) -> None:
    async with fleet(models=[{"max_num_batched_tokens": 4, "max_model_len": 400, "num_device_blocks": 200}]) as world:
        world.submit("a", prompt=(MAX_STEPS + 5) * 4, max_tokens=2)
        await world.run()
    prefill = sink.of("a").children[1]
    assert len(prefill.children) == MAX_STEPS
    assert prefill.attributes["cadenza.num_steps"] == MAX_STEPS + 5


async def test_the_caller_decides_whether_a_request_is_traced(sink: Sink) -> None:
    async with fleet(1) as world:
        sampled, unsampled = (parse_traceparent(f"00-{'a' * 32}-{'b' * 16}-0{flag}") for flag in (1, 0))
        spec = world.submit("root").request.spec
        for name, caller in (("sampled", sampled), ("unsampled", unsampled)):
            another = type(spec)(name, spec.prompt_token_ids, spec.sampling, 3)
            world.engine.submit(EngineRequest(another, trace=caller))
        await world.clock.advance(1.0)
    assert [span.attributes["gen_ai.request.id"] for span in sink.spans] == ["sampled", "root"]
    assert sink.parents == [sampled, None]
    assert sink.roots[0] is None
    assert sink.roots[1] is not None


async def test_many_that_end_at_once_have_their_spans_over_several_turns(sink: Sink) -> None:
    async with fleet(1) as world:
        for number in range(20):
            world.submit(f"r{number}", max_tokens=60)
        for number in range(20):
            world.engine.abort("", f"r{number}")
        await world.clock.advance(0)
        assert 0 < len(sink.spans) < 20
        await world.clock.advance(0.1)
        assert len(sink.spans) == 20


async def test_without_a_sink_nothing_is_recorded() -> None:
    async with fleet(1) as world:
        live = world.submit("a")
        await world.run()
        assert live.trace is None


async def test_spans_of_requests_that_end_with_the_service_are_sent(sink: Sink) -> None:
    async with fleet(1) as world:
        world.submit("a", max_tokens=60)
        await world.clock.advance(3.5 * STEP_S)
    assert sink.of("a").attributes["gen_ai.response.finish_reasons"] == ["aborted"]


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01", f"ff-{'a' * 32}-{'b' * 16}-01",
     f"00-{'A' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'b' * 16}-01-more", f"00-{'a' * 32}-{'b' * 16}-01\n"],
)  # fmt: skip
def test_a_malformed_context_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_later_version_may_have_more() -> None:
    context = parse_traceparent(f"01-{'a' * 32}-{'b' * 16}-03-more", "x=1")
    assert context == TraceContext("a" * 32, "b" * 16, sampled=True, tracestate="x=1")
