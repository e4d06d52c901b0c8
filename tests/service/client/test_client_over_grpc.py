"""AsyncClient against a scripted GenerationService over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import grpc
import pytest

from cadenza.async_client import AsyncClient
from cadenza.errors import (
    CadenzaError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
    UnsupportedError,
)
from cadenza.prompts import CallOptions, parse_prompts
from cadenza.sampling_params import SamplingParams
from cadenza.steps.watch import watch_steps
from cadenza_common.wire.transport import MAX_REQUEST_BYTES
from tests.helpers.client.scripted_server import Script, start, until


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def client(script):
    server, address = await start(script)
    async with AsyncClient(address) as client:
        yield client
    await server.stop(0)


# ---------------------------------------------------------------- streams


async def test_stream_yields_deltas(client, script):
    params = SamplingParams(temperature=0, max_tokens=None)
    deltas = [delta async for delta in client.stream("one two three", params, request_id="mine")]
    assert [[s.text for s in delta.outputs] for delta in deltas] == [[], ["one "], ["two "], ["three "]]
    assert [[s.token_ids for s in delta.outputs] for delta in deltas] == [[], [[0]], [[1]], [[2]]]
    assert [delta.finished for delta in deltas] == [False, False, False, True]
    assert deltas[-1].outputs[0].finish_reason == "stop"
    assert deltas[-1].prompt == "one two three"
    assert deltas[-1].prompt_token_ids == [1, 2, 3]
    assert deltas[-1].seed == 42
    (sent,) = script.params
    assert {field.name for field, _ in sent.ListFields()} == {"temperature"}


async def test_leaving_a_stream_aborts_the_request(client, script):
    async for delta in client.stream("hang on", request_id="broken-off"):
        if delta.outputs:
            break
    gc.collect()
    await until(lambda: script.cancelled == ["broken-off"])


async def test_closing_the_client_aborts_a_stream_that_nobody_waits_on(client, script):
    deltas = client.stream("hang on", request_id="paused")
    while not (await anext(deltas)).outputs:
        pass
    await client.close()
    await until(lambda: script.cancelled == ["paused"])
    await deltas.aclose()


async def test_a_stream_of_a_closed_client_does_not_begin_again(client, script):
    deltas = client.stream("hang on")
    await anext(deltas)
    await client.close()
    with pytest.raises(UnavailableError, match="the client was closed during the call"):
        await anext(deltas)
    assert len(script.params) == 1


async def test_an_exception_in_the_readers_body_aborts_the_request(client, script):
    with contextlib.suppress(ZeroDivisionError):
        async with contextlib.aclosing(client.stream("hang on", request_id="failed")) as deltas:
            async for delta in deltas:
                if delta.outputs:
                    raise ZeroDivisionError
    await until(lambda: script.cancelled == ["failed"])


async def test_cancelling_the_reading_task_aborts_the_request(client, script):
    async def read():
        async for _ in client.stream("hang on", request_id="cancelled"):
            pass

    task = asyncio.create_task(read())
    await until(script.hanging.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: script.cancelled == ["cancelled"])


async def test_errors_carry_their_details(client):
    with pytest.raises(InvalidRequestError) as caught:
        await anext(client.stream("bad"))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = caught.value.field_violations
    assert (violation.field, violation.description) == ("prompt", "has 9 tokens, max_model_len is 4")
    assert "max_model_len is 4" in str(caught.value)
    with pytest.raises(QueueFullError) as caught:
        await anext(client.stream("full"))
    assert caught.value.retry_after_s == pytest.approx(0.02)


async def test_a_stream_that_ends_unfinished_is_an_error(client):
    with pytest.raises(UnavailableError, match="unfinished"):
        async for _ in client.stream("vanish"):
            pass


async def test_no_server():
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.model_info()
        with pytest.raises(UnavailableError):
            await client.generate("a")
    with pytest.raises(UnavailableError, match="closed"):
        await client.model_info()


# ---------------------------------------------------------------- batches


async def test_generate_keeps_the_order_on_one_stream(client, script):
    prompts = [f"{'slow' if index % 7 == 0 else 'quick'} {index}" for index in range(300)]
    outputs = await client.generate(prompts, SamplingParams(max_tokens=5))
    assert [output.outputs[0].text.split() for output in outputs] == [prompt.split() for prompt in prompts]
    assert all(output.finished and output.outputs[0].token_ids == [0, 1] for output in outputs)
    assert [output.prompt for output in outputs] == prompts
    assert script.num_sessions == 1


async def test_generate_takes_every_form_and_params_for_each(client, script):
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    first, second = await client.generate(["a", [7, 8]], params)
    assert (first.outputs[0].text, second.outputs[0].text) == ("a ", "7 8 ")
    assert second.prompt is None
    assert [sent.max_tokens for sent in script.params] == [1, 2]
    (single,) = await client.generate([4, 5, 6])
    assert single.outputs[0].text == "4 5 6 "


async def test_one_failing_prompt_leaves_the_others(client):
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: .*too long") as caught:
        await client.generate(["a", "bad", "slow b", "bad"])
    error = caught.value
    assert error.prompt_index == 1
    assert sorted(error.errors) == [1, 3]
    assert [output and output.outputs[0].text for output in error.outputs] == ["a ", None, "slow b ", None]
    with pytest.raises(InvalidRequestError, match=r"^the prompt is too long"):
        await client.generate("bad")


async def test_a_request_too_large_to_be_sent_ends_alone(client, script, monkeypatch):
    monkeypatch.setattr("cadenza.calls.session.MAX_REQUEST_BYTES", 1000)
    with pytest.raises(
        InvalidRequestError, match=r"^prompt 1: the prompt has 20\d\d bytes, and a request can have 1000 in all$"
    ) as caught:
        await client.generate(["a", "x" * 2000, "b"])
    assert [output and output.outputs[0].text for output in caught.value.outputs] == ["a ", None, "b "]
    with pytest.raises(InvalidRequestError, match=r"^the prompt has 2003 bytes"):
        await client.generate("x" * 2000)
    assert script.num_sessions == 1


async def test_a_request_that_ends_without_its_last_response_is_an_error(client):
    with pytest.raises(CadenzaError, match="without its last response"):
        await client.generate("vanish")


async def test_each_prompt_that_ends_is_reported(client):
    """Also one that the server refuses, one that is never sent because it is too large, and one that fails."""
    seen = []
    prompts = parse_prompts(["a b", "bad", "x" * (MAX_REQUEST_BYTES + 1), "vanish", "slow c"])
    with pytest.raises(InvalidRequestError, match="prompt 1"):
        await client._run(prompts, None, CallOptions(), seen.append)
    assert sorted((each.prompt[:6], each.finished, len(each.outputs)) for each in seen) == [
        ("a b", True, 1), ("bad", False, 0), ("slow c", True, 1), ("vanish", False, 0), ("xxxxxx", False, 0),
    ]  # fmt: skip
    assert seen[0].prompt.startswith("x")
    assert seen[-1].prompt == "slow c"


async def test_a_full_queue_is_waited_for(client, script):
    script.capacity = 5
    outputs = await client.generate([f"slow {index}" for index in range(60)])
    assert [output.outputs[0].text for output in outputs] == [f"slow {index} " for index in range(60)]
    assert script.most_active == 5
    # The window learns: the first burst is refused, later ones hardly.
    assert 0 < script.num_refused < 60 + 60


async def test_a_batch_fills_the_executors_and_half_of_the_default_queue(client, script):
    script.max_num_seqs, script.all_have_come = 200, asyncio.Event()
    batch = asyncio.create_task(client.generate(["wait"] * 720))
    await until(lambda: script.active >= 712)
    assert script.active == 712
    script.all_have_come.set()
    assert len(await batch) == 720
    assert script.most_active == 712


async def test_cancelling_a_batch_aborts_it(client, script):
    task = asyncio.create_task(client.generate(["a", "hang"]))
    await until(script.hanging.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: script.cancelled == ["session"])


async def test_chat(client):
    one = [{"role": "user", "content": "hello you"}]
    (output,) = await client.chat(one)
    assert (output.outputs[0].text, output.prompt) == ("hello you ", None)
    outputs = await client.chat([one, one])
    assert [each.outputs[0].text for each in outputs] == ["hello you "] * 2
    deltas = [delta async for delta in client.stream_chat(one)]
    assert "".join(s.text for delta in deltas for s in delta.outputs) == "hello you "


# ---------------------------------------------------------------- the rest


async def test_abort_and_infos(client):
    assert await client.abort("running") is True
    assert await client.abort("other") is False
    info = await client.model_info()
    assert (info.model, info.vocab_size, info.eos_token_ids, info.bos_token_id) == ("m", 7, [2], 0)
    assert info.has_chat_template
    assert info.exact_numerics
    server = await client.server_info()
    assert server.options == {"max_num_seqs": "4"}
    assert server.load.num_running == 3
    assert server.executors[0].block_size == 16
    assert (server.resident_bytes, server.executors[0].resident_bytes) == (2**27, 2**33)


async def test_watch_of_steps(client, script):
    async with watch_steps(client) as watch:
        await watch.wait_left(1, 5.0)
        assert [record.step_id for record in watch.records] == [1]
        assert watch.num_dropped == 2
        started = time.monotonic()
        await watch.wait_left(2, 0.05)
        assert time.monotonic() - started < 30
    await until(lambda: script.cancelled == ["watch"])


async def test_a_server_that_is_something_else():
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncClient(address) as client:
        with pytest.raises(UnsupportedError, match=rf"{address} .* is it a Cadenza scheduler\?"):
            await client.generate("a")
    await server.stop(0)


async def test_arguments_that_are_wrong_by_themselves(client):
    with pytest.raises(TypeError, match="unexpected keyword argument 'tool'"):
        await client.chat([{"role": "user", "content": "a"}], tool=[])
    with pytest.raises(ValueError, match="tools must be a list of objects, not str 'a'"):
        await client.chat([{"role": "user", "content": "a"}], tools="a")
    with pytest.raises(ValueError, match="request_id must be a str, not int 5"):
        client.stream("a", request_id=5)
    with pytest.raises(ValueError, match="request_id holds a lone surrogate"):
        await client.abort("\ud800")


async def test_unknown_statuses_keep_their_code(script):
    class Missing(Script):
        async def Abort(self, request, context):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")

    server, address = await start(Missing())
    async with AsyncClient(address) as client:
        with pytest.raises(NotFoundError, match="no such request"):
            await client.abort("x")
    await server.stop(0)
