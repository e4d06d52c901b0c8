"""AsyncClient goes on after lost connections, against a scripted GenerationService over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from cadenza.async_client import AsyncClient
from cadenza.errors import (
    CadenzaError,
    InternalError,
    InvalidRequestError,
    RequestLostError,
    UnavailableError,
)
from cadenza.v1 import generation_pb2 as pb
from cadenza_common.wire import transport
from tests.helpers.client.scripted_server import STOPPED, Script, event, responses_to, start, until


class Breaking(Script):
    """Ends each of the first calls as it is told, after a word of output; then serves the rest."""

    def __init__(self, *ends: tuple[grpc.StatusCode, str]) -> None:
        super().__init__()
        self.ends = list(ends)
        self.requests: list[pb.GenerateRequest] = []
        self.aborted: list[str] = []
        self.num_damaged = 0
        """So many calls repeat a message."""
        self.num_silent = 0
        """So many calls break before any output."""

    async def Generate(self, request, context):
        self.requests.append(request)
        if self.num_silent:
            self.num_silent -= 1
            if request.starts_at_once:
                await context.write(pb.GenerateResponse(info=pb.RequestInfo(seed=42)))
            await context.abort(*GONE)
        start = request.resume.positions[0].token_index if request.resume.positions else 0
        await context.write(pb.GenerateResponse(info=pb.RequestInfo(seed=42)))
        indexes = list(range(start, len(WORDS)))
        if self.num_damaged:
            self.num_damaged -= 1
            indexes = [start, start] if self.num_damaged < 100 else [0, 0]
        for index in indexes:
            word = WORDS[index]
            output = pb.SampleOutput(first_token_index=index, token_ids=[index], text=word, text_offset=index)
            message = pb.GenerateResponse(outputs=[output])
            if index == len(WORDS) - 1:
                message.outputs[0].finish.CopyFrom(STOPPED)
                message.stats.num_completion_tokens = len(WORDS)
            await context.write(message)
            if self.ends:
                await context.abort(*self.ends.pop(0))

    async def Session(self, request_iterator, context):
        async for message in request_iterator:
            request = message.generate
            self.requests.append(request)
            if self.ends:
                code, text = end = self.ends.pop(0)
                error = transport.make_status(code, text)
                if end == GONE:
                    half = pb.GenerateResponse(outputs=[pb.SampleOutput(sample_index=1, token_ids=[7], text="x")])
                    half.outputs[0].finish.CopyFrom(STOPPED)
                    await context.write(event(request, response=half))
                    await context.abort(code, text)
                await context.write(event(request, error=error, done=True))
                continue
            first, last = responses_to(request) if request.prompt else (None, None)
            assert first is not None, "a request that the server has forgotten is sent anew"
            await context.write(event(request, response=first))
            await context.write(event(request, response=last, done=True))

    async def Abort(self, request, context):
        self.aborted.append(request.request_id)
        return pb.AbortResponse(aborted=True)


WORDS = "abcdef"
GONE = grpc.StatusCode.UNAVAILABLE, "the connection is gone"
STOPPING = grpc.StatusCode.UNAVAILABLE, "the service is stopping"
TAKEN = grpc.StatusCode.ABORTED, "another stream has taken this request over"


@contextlib.asynccontextmanager
async def broken(*ends):
    script = Breaking(*ends)
    server, address = await start(script)
    async with AsyncClient(address) as client:
        yield client, script
    await server.stop(0)


async def test_a_stream_resumes_at_the_next_token():
    async with broken(GONE, GONE, TAKEN) as (client, script):
        deltas = [delta async for delta in client.stream("a", request_id="mine", speculation=3)]
    assert "".join(sample.text for delta in deltas for sample in delta.outputs) == WORDS
    assert [bool(delta.outputs) for delta in deltas] == [False] + [True] * 6, "the start of a resumed stream is hidden"
    first, *rest = script.requests
    assert (first.resume_grace_s, first.speculation.num_draft_tokens) == (60, 3)
    assert [request.resume.positions[0].token_index for request in rest] == [1, 2, 3]
    assert {request.request_id for request in rest} == {"mine"}
    beside = {"request_id", "resume", "output_mode", "return_prompt_token_ids"}
    assert all({field.name for field, _ in request.ListFields()} <= beside for request in rest)
    assert script.aborted == []


@pytest.mark.parametrize(
    ("end", "expected", "message"),
    [
        (
            (grpc.StatusCode.NOT_FOUND, "no request"),
            RequestLostError,
            "request mine was lost: the server was restarted",
        ),
        ((grpc.StatusCode.DATA_LOSS, "other numerics"), RequestLostError, "other numerics"),
        ((grpc.StatusCode.INVALID_ARGUMENT, "wrong"), InvalidRequestError, "wrong"),
        ((grpc.StatusCode.INTERNAL, "a bug of ours"), None, ""),
    ],
)
async def test_what_ends_a_stream_that_was_resumed(end, expected, message):
    """Only what gRPC says of a broken stream is tried again."""
    async with broken(GONE, end) as (client, script):
        if expected is None:
            assert len([delta async for delta in client.stream("a", request_id="mine")]) == 7
            return
        with pytest.raises(expected, match=message) as caught:
            async for _ in client.stream("a", request_id="mine"):
                pass
        assert caught.value.code is end[0]
        assert len(script.requests) == 2


async def test_a_stream_that_something_has_damaged_is_begun_again_at_the_next_token():
    async with broken() as (client, script):
        await client.model_info()
        script.num_damaged = 3
        deltas = [delta async for delta in client.stream("a")]
        assert "".join(sample.text for delta in deltas for sample in delta.outputs) == WORDS
        assert len(script.requests) == 4
        script.num_damaged = 1000
        script.requests.clear()
        wrong = client.stream("a")
        assert len([await anext(wrong) for _ in range(2)]) == 2
        with pytest.raises(InternalError, match="the server sent token 0 where 1 was next"):
            await anext(wrong)
        assert len(script.requests) == 11, "a server that is wrong is given up"


async def test_a_stream_that_is_accepted_again_before_its_first_token_yields_no_empty_delta():
    """The server says at once that it has the request; what it says of the prompt comes with the first output."""
    async with broken() as (client, script):
        await client.model_info()
        script.num_silent = 2
        deltas = [delta async for delta in client.stream("a")]
        assert [request.starts_at_once for request in script.requests] == [False, True, True]
        assert all(delta.outputs for delta in deltas)
        assert (deltas[0].seed, "".join(delta.outputs[0].text for delta in deltas)) == (42, WORDS)


async def test_a_request_is_aborted_that_is_left_while_its_connection_is_lost():
    async with broken(*[GONE] * 1000) as (client, script):
        script.num_damaged = 0
        deltas = client.stream("a", request_id="mine")
        await anext(deltas)

        async def read():
            async for _ in deltas:
                pass

        task = asyncio.create_task(read())
        await until(lambda: len(script.requests) >= 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert script.aborted == ["mine"]


async def test_a_take_over_by_another_client_is_an_error():
    async with broken(TAKEN) as (client, script):
        with pytest.raises(CadenzaError, match="another stream has taken this request over"):
            async for _ in client.stream("a", request_id="mine"):
                pass
        assert len(script.requests) == 1


async def test_without_a_grace_the_request_says_so():
    async with broken(GONE) as (other, script):
        async with AsyncClient(other.target, reconnect_timeout_s=0) as client:
            deltas = client.stream("a")
            assert len([await anext(deltas) for _ in range(2)]) == 2
            with pytest.raises(UnavailableError):
                await anext(deltas)
        assert not script.requests[0].HasField("resume_grace_s")


async def test_a_session_sends_anew_what_the_server_has_forgotten():
    """It had the second sample; nobody has seen it, and the first one may come out differently."""
    missing = grpc.StatusCode.NOT_FOUND, "no request"
    async with broken(GONE, missing) as (client, script):
        await client.model_info()
        (output,) = await client.generate(["one two"], speculation=0)
    assert [sample.text for sample in output.outputs] == ["one two "]
    first, resumed, anew = script.requests
    assert not first.starts_at_once
    first.starts_at_once = True
    assert first == anew
    assert anew.HasField("speculation")
    assert not resumed.HasField("speculation")
    (position,) = resumed.resume.positions
    assert (position.sample_index, position.token_index, position.finished) == (1, 1, True)
    assert resumed.output_mode == pb.OUTPUT_MODE_FINAL


async def test_a_request_of_a_session_that_is_refused_while_the_server_stops_is_sent_again():
    async with broken(STOPPING, STOPPING) as (client, script):
        with pytest.raises(UnavailableError, match="the service is stopping"):
            await client.generate(["one two"])
        await client.model_info()
        (output,) = await client.generate(["one two"])
        assert output.outputs[0].text == "one two "
        assert len(script.requests) == 3
        script.ends = [STOPPING] * 1000
        async with AsyncClient(client.target, reconnect_timeout_s=0.2) as impatient:
            await impatient.model_info()
            with pytest.raises(UnavailableError, match="the service is stopping"):
                await impatient.generate(["one two"])


async def test_a_session_takes_back_its_own_requests_only_after_a_loss():
    async with broken(TAKEN) as (client, script):
        with pytest.raises(CadenzaError, match="another stream has taken this request over"):
            await client.generate(["one two"])
    async with broken(GONE, (grpc.StatusCode.NOT_FOUND, "no request"), TAKEN) as (client, script):
        await client.model_info()
        (output,) = await client.generate(["one two"])
        assert output.outputs[0].text == "one two "
        assert len(script.requests) == 4
