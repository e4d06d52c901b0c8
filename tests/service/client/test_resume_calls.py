"""Resume over gRPC: streams that are lost and attached again, in Generate and in Session."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from tests.helpers.scheduler.scheduler_world import (
    Output,
    collect,
    error_of,
    request,
    script,
    session_events,
    violation,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_errors_are_logged")]
GRACE_S = 60.0
TEXT = "你好, world 😀! One two three four five."
REPLACED = "another stream has taken this request over"


def resume(request_id, *positions, **fields):
    """A message that resumes from (sample, token, finished)."""
    found = [
        pb.SamplePosition(sample_index=sample, token_index=token, finished=finished)
        for sample, token, finished in positions
    ]
    return pb.GenerateRequest(request_id=request_id, resume=pb.ResumePoint(positions=found), **fields)


def kept(request_id="a", **fields):
    return request(request_id=request_id, resume_grace_s=GRACE_S, **fields)


async def finished(w, message):
    """Run a request to its end and take its stream away before anything was received."""
    call = w.stub.Generate(message)
    await w.until(lambda: (live := w.engine.find("", message.request_id)) is not None and live.ended)
    call.cancel()


def code_of(status):
    return next(code for code in grpc.StatusCode if code.value[0] == status.code)


async def test_a_lost_stream_is_resumed_from_any_token(w):
    ids = script(w, TEXT)
    await finished(w, kept(max_tokens=100))
    whole = await collect(w.stub.Generate(resume("a")))
    assert (whole.ids[:-1], whole.text) == (ids, TEXT)
    text_starts = []
    for start in range(len(whole.ids) + 1):
        (response,) = [each async for each in w.stub.Generate(resume("a", (0, start, False)))]
        assert response.info.seed == 1
        text_starts.append(response.outputs[0].text_offset)
        out = Output()
        out.ids, out.text = whole.ids[:start], whole.text[: text_starts[-1]]
        response.ClearField("info")
        out.add(response)
        assert (out.ids, out.text, out.stats) == (whole.ids, whole.text, whole.stats)
    assert text_starts == sorted(text_starts)
    (last,) = [response async for response in w.stub.Generate(resume("a", (0, len(whole.ids), True)))]
    assert not last.outputs
    assert last.stats == whole.stats


async def test_a_running_request_goes_on_without_a_stream(w):
    call = w.stub.Generate(kept(max_tokens=200))
    first = await call.read()
    call.cancel()
    await w.until(lambda: not w.engine.find("", "a").has_listener)
    out = Output().add(first)
    out.info = None
    w.executor.going.clear()
    async with asyncio.timeout(10):
        call = w.stub.Generate(resume("a", (0, len(out.ids), False)))
        start = await call.read()
    assert start.info.seed == 1, "the answer comes at once, though no step runs"
    w.executor.going.set()
    start.ClearField("info")
    out.add(start)
    while (response := await call.read()) is not grpc.aio.EOF:
        out.add(response)
    assert out.ids == [101] * 200
    await w.idle()


async def test_a_second_stream_takes_over(w):
    w.executor.going.clear()
    first = w.stub.Generate(request(request_id="a"))
    await w.until(lambda: w.engine.find("", "a") is not None)
    second = w.stub.Generate(resume("a"))
    status = await error_of(first)
    assert (code_of(status), status.message) == (grpc.StatusCode.ABORTED, REPLACED)
    session = w.stub.Session()
    await session.write(pb.SessionRequest(generate=resume("a")))
    assert code_of(await error_of(second)) is grpc.StatusCode.ABORTED
    await session.read()
    third = w.stub.Generate(request(request_id="a"))
    (event,) = (await session.read()).events
    assert (event.request_id, code_of(event.error), event.error.message, event.done) == (
        "a", grpc.StatusCode.ABORTED, REPLACED, True,
    )  # fmt: skip
    await session.done_writing()
    w.executor.going.set()
    assert len((await collect(third)).ids) == 8
    await w.idle()


async def test_a_resume_that_is_refused_takes_nothing_over(w):
    w.executor.going.clear()
    first = w.stub.Generate(request(request_id="a"))
    await w.until(lambda: w.engine.find("", "a") is not None)
    for message, path in (
        (resume("a", (0, 5, False)), "resume.positions[0].token_index"),
        (resume("a", (1, 0, False)), "resume.positions[0].sample_index"),
        (resume("a", (0, 0, True)), "resume.positions[0].finished"),
        (resume("a", output_mode=9), "output_mode"),
        (resume("a", timeout_s=3), "timeout_s"),
        (resume("a", resume_grace_s=3), "resume_grace_s"),
        (resume(""), "request_id"),
    ):
        status = await error_of(w.stub.Generate(message))
        assert (code_of(status), violation(status)) == (grpc.StatusCode.INVALID_ARGUMENT, path)
    w.executor.going.set()
    assert len((await collect(first)).ids) == 8


async def test_ids_belong_to_bodies(w):
    await finished(w, kept())
    again = await collect(w.stub.Generate(kept()))
    assert len(again.ids) == 8
    assert again.info is not None
    status = await error_of(w.stub.Generate(kept(seed=2)))
    assert code_of(status) is grpc.StatusCode.ALREADY_EXISTS
    assert code_of(await error_of(w.stub.Generate(resume("b")))) is grpc.StatusCode.NOT_FOUND
    assert not (await w.stub.Abort(pb.AbortRequest(request_id="a"))).aborted
    status = await error_of(w.stub.Generate(resume("a")))
    assert code_of(status) is grpc.StatusCode.NOT_FOUND, "an abort ends the grace"


@pytest.mark.parametrize("api", ["generate", "session"])
async def test_a_request_that_is_sent_again_is_accepted_before_there_is_output(w, api):
    """Also by a scheduler that does not know it: the client learns that this one is at work."""
    w.executor.going.clear()
    message = kept(starts_at_once=True)
    if api == "generate":
        call = w.stub.Generate(message)
        first = await call.read()
    else:
        call = w.stub.Session()
        await call.write(pb.SessionRequest(generate=message))
        (event,) = (await call.read()).events
        first = event.response
    assert first.info.seed == 1
    assert not first.outputs
    live = w.engine.find("", "a")
    assert live.num_completion_tokens == 0
    w.executor.going.set()
    await w.until(lambda: live.ended)
    call.cancel()
    again = await collect(w.stub.Generate(kept()))
    assert len(again.ids) == 8, "the same body: how it is to start is no part of it"


async def test_a_grace_ends(w):
    w.service._engine.kept._max_grace_s = 0.05
    await finished(w, kept())
    await w.until(lambda: w.engine.find("", "a") is None)
    status = await error_of(w.stub.Generate(resume("a")))
    assert (code_of(status), status.message) == (
        grpc.StatusCode.NOT_FOUND,
        "no request 'a' runs or is kept: there was none, or its grace is over",
    )


@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"output_mode": pb.OUTPUT_MODE_FINAL}])
async def test_logprobs_and_final_output_are_resumed(w, fields):
    whole = [r async for r in w.stub.Generate(request(max_tokens=12, temperature=1.0, **fields))]
    await finished(w, kept(max_tokens=12, temperature=1.0, **fields))
    mode = {"output_mode": fields["output_mode"]} if "output_mode" in fields else {}
    ends = {}
    for response in whole:
        for output in response.outputs:
            ids, logprobs = ends.get(output.sample_index, ([], []))
            ends[output.sample_index] = [*ids, *output.token_ids], [*logprobs, *output.logprobs.top_logprobs]
    for cut in (0, 5, 12):
        rest = {}
        async for response in w.stub.Generate(resume("a", *((i, cut, False) for i in ends), **mode)):
            for output in response.outputs:
                assert output.first_token_index == cut
                assert output.HasField("finish")
                rest[output.sample_index] = (list(output.token_ids), list(output.logprobs.top_logprobs))
        per_token = len(ends[0][1]) // len(ends[0][0])
        assert rest == {i: (ids[cut:], logprobs[cut * per_token :]) for i, (ids, logprobs) in ends.items()}


async def test_a_session_resumes_what_another_one_lost(w):
    script(w, TEXT, seed=9)
    w.executor.going.clear()
    first = w.stub.Session()
    for index in range(20):
        await first.write(pb.SessionRequest(generate=kept(str(index), seed=9, max_tokens=100)))
    await w.until(lambda: w.engine.find("", "19") is not None)  # a cancel loses what has not arrived
    w.executor.going.set()
    outs = {}
    for event in (await first.read()).events:
        outs.setdefault(event.request_id, Output()).add(event.response)
    first.cancel()
    await w.until(lambda: len([live for live in w.engine._live.values() if live.has_listener]) == 0)
    second = w.stub.Session()
    for index in range(20):
        out = outs.setdefault(str(index), Output())
        await second.write(pb.SessionRequest(generate=resume(str(index), (0, len(out.ids), False))))
    await second.write(pb.SessionRequest(generate=resume("unknown")))
    await second.done_writing()
    errors = []
    while (message := await second.read()) is not grpc.aio.EOF:
        for event in message.events:
            if event.HasField("error"):
                errors.append((event.request_id, code_of(event.error), event.done))
                continue
            event.response.ClearField("info")
            outs[event.request_id].add(event.response)
    assert errors == [("unknown", grpc.StatusCode.NOT_FOUND, True)]
    assert {out.text for out in outs.values()} == {TEXT}
    assert {out.finish.detail for out in outs.values()} == {types_pb2.FINISH_DETAIL_EOS}
    await w.idle()


async def test_a_session_resumes_its_own_request_elsewhere(w):
    """The new position holds; the request has no second end."""
    w.executor.going.clear()
    call = w.stub.Session()
    await call.write(pb.SessionRequest(generate=request(request_id="a")))
    await w.until(lambda: w.engine.find("", "a") is not None)
    await call.write(pb.SessionRequest(generate=resume("a", (0, 9, False))))
    await call.write(pb.SessionRequest(generate=resume("a")))
    await call.write(pb.SessionRequest(generate=request(request_id="a")))
    await call.done_writing()
    (refused,) = (await call.read()).events
    assert (refused.done, violation(refused.error)) == (False, "resume.positions[0].token_index")
    w.executor.going.set()
    outs = {}
    _, errors = await session_events(call, outs)
    assert not errors
    assert len(outs["a"].ids) == 8
    await w.idle()
