"""Session over gRPC: many requests on one stream, each with its own end."""

from __future__ import annotations

from unittest.mock import ANY

import grpc
import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from tests.helpers.scheduler.scheduler_world import Output, collect, request, script, session_events, violation

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_errors_are_logged")]


async def test_session_coalesces_and_finishes_after_half_close(w):
    script(w, "Hello there", seed=9)
    call = w.stub.Session()
    w.executor.going.clear()
    for index in range(50):
        await call.write(pb.SessionRequest(generate=request(seed=9, request_id=str(index), max_tokens=50)))
    await call.done_writing()
    await w.until(lambda: len(w.engine._live) == 50)
    w.executor.going.set()
    outs = {}
    num, errors = await session_events(call, outs)
    assert not errors
    assert len(outs) == 50
    assert {out.text for out in outs.values()} == {"Hello there"}
    total = sum(out.num for out in outs.values())
    assert num < total / 10, "outputs of one step travel together"
    assert await call.code() is grpc.StatusCode.OK
    await w.idle()


async def test_prompt_ids_count_towards_the_size_of_a_sessions_message(w, monkeypatch):
    monkeypatch.setattr("scheduler_svc.front.session.MAX_CHUNK_BYTES", 500)
    w.executor.going.clear()
    call = w.stub.Session()
    for index in range(20):
        wanted = request(ids=[3] * 200, request_id=str(index), return_prompt_token_ids=True)
        await call.write(pb.SessionRequest(generate=wanted))
    await call.done_writing()
    await w.until(lambda: len(w.engine._live) == 20)
    for index in range(20):
        w.engine.abort("", str(index))
    counts = [len(message.events) async for message in call]
    assert counts == [1] * 20
    w.executor.going.set()
    await w.idle()


async def test_one_requests_error_is_its_own(w):
    w.executor.going.clear()
    call = w.stub.Session()
    await call.write(pb.SessionRequest(generate=request(request_id="bad", temperature=-1)))
    await call.write(pb.SessionRequest(generate=request(request_id="good")))
    await call.write(pb.SessionRequest(generate=request(request_id="good")))
    await call.write(pb.SessionRequest(generate=request(request_id="good", seed=2)))
    await call.write(pb.SessionRequest(generate=request()))
    await call.write(pb.SessionRequest())
    await call.done_writing()
    errors, outs = [], {}
    while len(errors) < 4:
        errors += (await call.read()).events
    w.executor.going.set()
    assert await session_events(call, outs) == (ANY, [])
    assert len(outs["good"].ids) == 8
    assert [(e.request_id, e.error.code, e.done) for e in errors] == [
        ("bad", grpc.StatusCode.INVALID_ARGUMENT.value[0], True),
        ("good", grpc.StatusCode.ALREADY_EXISTS.value[0], False),
        ("", grpc.StatusCode.INVALID_ARGUMENT.value[0], True),
        ("", grpc.StatusCode.INVALID_ARGUMENT.value[0], True),
    ]
    assert violation(errors[0].error) == "sampling_params.temperature"
    await w.idle()


async def test_abort_in_a_session(w):
    w.executor.going.clear()
    call = w.stub.Session()
    long_text = "Hello there, world! " * 400  # too long for the event loop: tokenized in a thread
    await call.write(pb.SessionRequest(generate=request(request_id="a")))
    await call.write(pb.SessionRequest(generate=request(long_text, request_id="b", truncate_prompt_tokens=10)))
    await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="a")))
    await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="unknown")))
    message = await call.read()
    assert [event.request_id for event in message.events] == ["a"]
    assert message.events[0].response.outputs[0].finish.detail == types_pb2.FINISH_DETAIL_ABORTED
    w.executor.going.set()
    await call.done_writing()
    outs = {}
    _, errors = await session_events(call, outs)
    assert not errors
    assert outs["b"].info.num_prompt_tokens == 10
    await w.idle()


async def test_a_lost_session_aborts_all_of_its_requests(w):
    call = w.stub.Session()
    for index in range(10):
        await call.write(pb.SessionRequest(generate=request(request_id=str(index), max_tokens=200)))
    await call.read()
    call.cancel()
    await w.idle()
    assert w.service._front.num_streams == 0


async def test_a_slow_reader_gets_few_messages_and_holds_nobody_up(w):
    slow = w.stub.Session()
    await slow.write(pb.SessionRequest(generate=request(request_id="slow", max_tokens=200)))
    await slow.done_writing()
    quick = await collect(w.stub.Generate(request(max_tokens=200)))
    assert len(quick.ids) == 200
    outs = {}
    await session_events(slow, outs)
    assert len(outs["slow"].ids) == 200


async def test_requests_with_much_output_take_turns(w, monkeypatch):
    """All end in the same step, the one with the most output first; none waits for another's last message."""
    monkeypatch.setattr("scheduler_svc.front.session.MAX_CHUNK_BYTES", 8000)
    monkeypatch.setattr("scheduler_svc.front.session.TURN_BYTES", 500)
    final = {"output_mode": pb.OUTPUT_MODE_FINAL, "max_tokens": 100}
    w.executor.going.clear()
    before = w.stub.Generate(request())
    # With no further plan allowed in flight, the next one admits them all.
    await w.until(lambda: w.engine.executor_infos()[0].num_inflight_plans == 2)
    call = w.stub.Session()
    await call.write(pb.SessionRequest(generate=request(request_id="much", logprobs=20, **final)))
    for index in range(5):
        await call.write(pb.SessionRequest(generate=request(request_id=str(index), **final)))
    await call.done_writing()
    await w.until(lambda: len(w.engine._live) == 7)
    w.executor.going.set()
    first, outs = await call.read(), {}
    assert {event.request_id for event in first.events} == {"much", "0", "1", "2", "3", "4"}
    for event in first.events:
        outs.setdefault(event.request_id, Output()).add(event.response)
    assert outs["much"].finish is None, "the case is what it says"
    assert await session_events(call, outs) == (ANY, [])
    assert {len(out.ids) for out in outs.values()} == {100}
    assert len((await collect(before)).ids) == 8
    await w.idle()
