"""What clients see when the executor comes back with another model, other numerics or other limits."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cadenza import AsyncClient, SamplingParams
from cadenza.errors import FailedPreconditionError
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from tests.helpers.scheduler.scheduler_world import Output, collect, error_of, request, session_events, violation, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor

pytestmark = pytest.mark.timeout(60)

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION.value[0]


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer whose ids mean other texts."""
    from tests.helpers.models.toy_tokenizers import unigram

    folder = tmp_path_factory.mktemp("other")
    unigram()._inner.save_pretrained(folder)
    return str(folder)


async def read_on(call: Any, out: Output) -> None:
    """Read to the end of the stream."""
    while (response := await call.read()) is not grpc.aio.EOF:
        out.add(response)


def another_model(tokenizer: str) -> dict[str, Any]:
    return {"name": "other", "vocab_size": 600, "tokenizer": tokenizer, "digest": b"e" * 32, "max_model_len": 128}


async def test_a_stream_gets_its_output_so_far_and_then_the_error(tokenizer_folder: str, other_tokenizer: str) -> None:
    async with world(ScriptedExecutor(tokenizer=tokenizer_folder)) as w:
        call = w.stub.Generate(request(max_tokens=200))
        out = Output().add(await call.read())
        await w.executor.become(**another_model(other_tokenizer))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_on(call, out)
        assert out.ids == [101] * len(out.ids)
        assert out.finish is None
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == (
            f"the executor at {w.engine.executor_infos()[0].target} came back with another model: toy with 512 token "
            "ids became other with 600"
        )
        await w.idle()


async def test_the_new_model_is_served_with_its_own_tokenizer(tokenizer_folder: str, other_tokenizer: str) -> None:
    async with world(ScriptedExecutor(tokenizer=tokenizer_folder)) as w:
        tokenize = pb.TokenizeRequest(prompt=[types_pb2.PromptPart(text="Hello there")])
        before = list((await w.stub.Tokenize(tokenize)).token_ids)
        watch = w.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await w.executor.become(**another_model(other_tokenizer))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        info = await w.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model, info.vocab_size, info.max_model_len, info.has_chat_template) == ("other", 600, 128, False)
        after = list((await w.stub.Tokenize(tokenize)).token_ids)
        assert after != before
        out = await collect(w.stub.Generate(request("Hello there", return_prompt_token_ids=True)))
        assert list(out.info.prompt_token_ids) == after
        assert len(out.ids) == 8
        long = pb.TokenizeRequest(prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[599]))])
        assert list((await w.stub.Tokenize(long)).token_ids) == [599]


async def test_a_session_reports_each_error_and_serves_the_new_model(
    tokenizer_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with world(tokenizer=tokenizer_folder, log_requests=True) as w:
        call = w.stub.Session()
        for name, mode in (("delta", pb.OUTPUT_MODE_DELTA), ("final", pb.OUTPUT_MODE_FINAL)):
            message = request(request_id=name, max_tokens=200, output_mode=mode)
            await call.write(pb.SessionRequest(generate=message))
        first = await call.read()
        assert [event.request_id for event in first.events] == ["delta"]
        await w.executor.become(name="other", digest=b"e" * 32)
        outs = {"delta": Output().add(first.events[0].response)}
        await w.until(lambda: not w.engine._live)
        await w.until(lambda: w.engine.connected)
        await call.write(pb.SessionRequest(generate=request(request_id="new")))
        await call.done_writing()
        _, errors = await session_events(call, outs)
        assert sorted(event.request_id for event in errors) == ["delta", "final"]
        for event in errors:
            assert (event.done, event.error.code, len(event.error.details)) == (True, PRECONDITION, 0)
            assert "came back with another numerics fingerprint" in event.error.message
            assert "model toy became other" in event.error.message
        assert set(outs) == {"delta", "new"}, "a request with OUTPUT_MODE_FINAL has no part of its output"
        assert (outs["delta"].finish, outs["delta"].stats) == (None, None)
        assert outs["new"].ids == [101] * 8
        lines = [record.getMessage() for record in caplog.records if "request 'final'" in record.getMessage()]
        assert len(lines) == 1, "it ended, and was not refused"
        assert lines[0].startswith("request 'final': ModelChangedError, prompt 2 tokens, output ")
        assert await call.code() is grpc.StatusCode.OK


async def test_a_request_that_fits_no_more_ends_alone(tokenizer_folder: str) -> None:
    async with world(tokenizer=tokenizer_folder) as w:
        w.executor.going.clear()
        logprobs, long, fits = (
            w.stub.Generate(request(request_id="logprobs", logprobs=9)),
            w.stub.Generate(request(request_id="long", ids=[5] * 100)),
            w.stub.Generate(request(request_id="fits")),
        )
        await w.until(lambda: len(w.engine._live) == 3)
        await w.executor.become(max_num_seqs=1, max_logprobs=5, num_blocks=6)
        statuses = [await error_of(logprobs), await error_of(long)]
        assert [(status.code, violation(status)) for status in statuses] == [
            (PRECONDITION, "sampling_params.logprobs"),
            (PRECONDITION, "prompt"),
        ]
        assert statuses[0].message == "sampling_params.logprobs: the executor returns at most 5, not 9"
        assert statuses[1].message == (
            "prompt: the executor that came back cannot hold it: 100 prompt tokens and one of output need 7 KV "
            "blocks of 16 tokens; the pool has 6"
        )
        w.executor.going.set()
        assert len((await collect(fits)).ids) == 8


async def test_a_copied_folder_changes_nothing_but_the_name(tokenizer_folder: str, tmp_path: Any) -> None:
    from tests.helpers.models.toy_tokenizers import hf_byte_level

    hf_byte_level().save_pretrained(tmp_path)
    async with world(ScriptedExecutor(tokenizer=tokenizer_folder)) as w:
        call = w.stub.Generate(request(max_tokens=200))
        out = Output().add(await call.read())
        await w.executor.become(name="copy", tokenizer=str(tmp_path))
        await read_on(call, out)
        assert out.ids == [101] * 200
        assert (await w.stub.GetModelInfo(pb.GetModelInfoRequest())).model == "copy"


async def test_the_same_size_with_another_tokenizer_is_another_vocabulary(
    tokenizer_folder: str, other_tokenizer: str
) -> None:
    async with world(ScriptedExecutor(tokenizer=tokenizer_folder), allow_fingerprint_change=True) as w:
        call = w.stub.Generate(request(max_tokens=200))
        out = Output().add(await call.read())
        await w.executor.become(tokenizer=other_tokenizer, digest=b"e" * 32)
        with pytest.raises(grpc.aio.AioRpcError, match="and its tokenizer has other tokens"):
            await read_on(call, out)


async def test_a_tokenizer_that_cannot_be_loaded_keeps_requests_waiting(
    tokenizer_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(ScriptedExecutor(tokenizer=tokenizer_folder)) as w:
        call = w.stub.Generate(request(max_tokens=200))
        out = Output().add(await call.read())
        await w.executor.become(digest=b"e" * 32, tokenizer="/no/such/folder")
        await w.until(lambda: "cannot be used: there is no folder '/no/such/folder'" in caplog.text)
        assert not w.engine.connected
        w.executor.digest, w.executor.tokenizer = b"d" * 32, tokenizer_folder
        await read_on(call, out)
        assert out.ids == [101] * 200


async def test_the_client_raises_failed_precondition(tokenizer_folder: str) -> None:
    async with world(tokenizer=tokenizer_folder) as w, AsyncClient(w.target) as client:
        stream = client.stream([5, 6], SamplingParams(max_tokens=200))
        first = await anext(stream)
        assert first.outputs[0].token_ids
        await w.executor.become(vocab_size=600)
        with pytest.raises(FailedPreconditionError, match="another model"):
            _ = [delta async for delta in stream]
