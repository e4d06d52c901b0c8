"""Generate over gRPC: streams, stops, deadlines, ids, and what is freed when a client leaves."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.scheduler_world import collect, error_of, request, script, violation, world
from tests.helpers.scheduler.scripted_executor import EOS, ScriptedExecutor

REPLACED = "another stream has taken this request over"
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_errors_are_logged")]


async def test_generate_streams_text_and_ends_at_eos(w):
    ids = script(w, "你好, world 😀!")
    out = await collect(w.stub.Generate(request(max_tokens=100, return_prompt_token_ids=True)))
    assert out.ids == [*ids, EOS]
    assert out.text == "你好, world 😀!"
    assert (out.finish.reason, out.finish.detail) == (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_DETAIL_EOS)
    assert out.finish.WhichOneof("stop_reason") is None
    assert list(out.info.prompt_token_ids) == byte_level().encode("Hello")
    assert out.info.seed == 1
    assert out.stats.num_completion_tokens == len(ids) + 1
    assert out.stats.num_prompt_tokens == out.info.num_prompt_tokens
    assert 0 < out.stats.queue_ns <= out.stats.first_token_ns <= out.stats.total_ns
    await w.idle()


async def test_the_drawn_seed_is_reported(w):
    message = request(ids=[5, 6])
    message.sampling_params.ClearField("seed")
    outs = [await collect(w.stub.Generate(message)) for _ in range(2)]
    assert outs[0].info.seed != outs[1].info.seed
    assert outs[0].finish.detail == types_pb2.FINISH_DETAIL_MAX_TOKENS
    assert len(outs[0].ids) == 8


async def test_stop_string_over_token_borders(w):
    script(w, "one two three four")
    out = await collect(w.stub.Generate(request(stop=["o thr"], max_tokens=50)))
    assert out.text == "one tw"
    assert out.finish.stop_string == "o thr"
    assert out.finish.detail == types_pb2.FINISH_DETAIL_STOP_STRING
    kept = await collect(w.stub.Generate(request(stop=["o thr"], max_tokens=50, include_stop_str_in_output=True)))
    assert kept.text == "one two thr"
    assert kept.ids == out.ids
    await w.idle()


async def test_stop_token(w):
    ids = script(w, "abc def")
    out = await collect(w.stub.Generate(request(stop_token_ids=[ids[2]], max_tokens=50)))
    assert out.ids == ids[:3]
    assert out.finish.stop_token_id == ids[2]
    assert out.text == byte_level().decode(ids[:2])


async def test_final_mode_sends_once(w):
    script(w, "all of it at once")
    out = await collect(w.stub.Generate(request(max_tokens=50, output_mode=pb.OUTPUT_MODE_FINAL)))
    assert out.num == 1
    assert out.text == "all of it at once"
    assert out.info is not None
    assert out.stats is not None


async def test_logprobs_have_texts(w):
    script(w, "ab")
    responses = [r async for r in w.stub.Generate(request(logprobs=2))]
    columns = [o.logprobs for r in responses for o in r.outputs if o.HasField("logprobs")]
    assert sum(len(c.chosen_logprobs) for c in columns) == len(byte_level().encode("ab")) + 1
    assert all(c.num_top == 2 and len(c.top_tokens) == 2 * len(c.chosen_tokens) for c in columns)
    assert responses[-1].outputs[0].cumulative_logprob == pytest.approx(-0.5 * (len(byte_level().encode("ab")) + 1))
    silent = [r async for r in w.stub.Generate(request(logprobs=0, detokenize=False))]
    assert not silent[0].outputs[0].logprobs.chosen_tokens
    assert not silent[0].outputs[0].text


async def test_chat_is_rendered(w):
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="Hello")])
    message = request()
    message.prompt[0].chat.CopyFrom(chat)
    message.return_prompt_token_ids = True
    out = await collect(w.stub.Generate(message))
    text = byte_level().decode(list(out.info.prompt_token_ids), skip_special_tokens=False)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    message.prompt[0].chat.messages[0].role = "refused"
    status = await error_of(w.stub.Generate(message))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert violation(status) == "prompt[0].chat"
    assert "no such role" in status.message


async def test_what_is_wrong_is_named(w):
    status = await error_of(w.stub.Generate(request(top_p=1.5)))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert violation(status) == "sampling_params.top_p"
    assert violation(await error_of(w.stub.Generate(request(ids=[1, 2, 512])))) == "prompt[0].tokens.ids[2]"
    too_long = await error_of(w.stub.Generate(request(ids=[1] * 256)))
    assert violation(too_long) == "prompt"
    assert "256" in too_long.message
    await w.idle()


async def test_timeout_ends_with_what_there_is(w):
    out = await collect(w.stub.Generate(request(max_tokens=200, timeout_s=0.3, seed=3)))
    if out.finish.detail != types_pb2.FINISH_DETAIL_MAX_TOKENS:  # 200 steps may well be done by then
        assert out.finish.detail == types_pb2.FINISH_DETAIL_DEADLINE
    w.executor.going.clear()
    out = await collect(w.stub.Generate(request(timeout_s=0.1, seed=3)))
    assert (out.finish.reason, out.finish.detail) == (types_pb2.FINISH_REASON_ABORT, types_pb2.FINISH_DETAIL_DEADLINE)
    assert out.info is not None
    assert out.stats.num_completion_tokens == 0
    w.executor.going.set()
    await w.idle()


async def test_the_calls_own_deadline_frees_everything(w):
    w.executor.going.clear()
    call = w.stub.Generate(request(), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [r async for r in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await w.until(lambda: not w.engine._live)
    w.executor.going.set()
    await w.idle()


async def test_cancel_frees_everything(w):
    call = w.stub.Generate(request(max_tokens=200))
    await call.read()
    call.cancel()
    await w.idle()
    assert w.service._front.num_streams == 0


async def test_clients_that_leave_at_any_moment(w):
    async def leave_after(num, index):
        call = w.stub.Generate(request(max_tokens=100, seed=index, logprobs=5))
        for _ in range(num):
            await call.read()
        call.cancel()

    async def leave_session_after(num):
        call = w.stub.Session()
        for index in range(5):
            await call.write(pb.SessionRequest(generate=request(request_id=str((num, index)), max_tokens=100)))
        for _ in range(num):
            await call.read()
        call.cancel()

    await asyncio.gather(
        *(leave_after(index % 7, index) for index in range(40)), *(leave_session_after(num) for num in range(6))
    )
    await w.idle()
    await w.until(lambda: w.service._front.num_streams == 0)


async def test_abort_from_elsewhere(w):
    w.executor.going.clear()
    call = w.stub.Generate(request(request_id="a"))
    await w.until(lambda: w.engine.find("", "a") is not None)
    assert not (await w.stub.Abort(pb.AbortRequest(request_id="b"))).aborted
    assert (await w.stub.Abort(pb.AbortRequest(request_id="a"))).aborted
    out = await collect(call)
    assert out.finish.detail == types_pb2.FINISH_DETAIL_ABORTED
    w.executor.going.set()
    await w.idle()


async def test_same_id(w):
    w.executor.going.clear()
    first = w.stub.Generate(request(request_id="a"))
    await w.until(lambda: w.engine.find("", "a") is not None)
    status = await error_of(w.stub.Generate(request(request_id="a", seed=2)))
    assert status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    second = w.stub.Generate(request(request_id="a"))
    status = await error_of(first)
    assert (status.code, status.message) == (grpc.StatusCode.ABORTED.value[0], REPLACED)
    w.executor.going.set()
    assert len((await collect(second)).ids) == 8
    await w.idle()


async def test_full_queue_says_when_to_retry(tokenizer_folder):
    async with world(ScriptedExecutor(max_num_seqs=1), skip_tokenizer_init=True, max_queued_requests=1) as w:
        w.executor.going.clear()
        calls = [w.stub.Generate(request(ids=[1, 2], request_id="0"))]
        await w.until(lambda: w.engine.load().num_running == 1)
        calls.append(w.stub.Generate(request(ids=[1, 2], request_id="1")))
        await w.until(lambda: w.engine.load().num_waiting == 1)
        status = await error_of(w.stub.Generate(request(ids=[1, 2])))
        assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
        w.executor.going.set()
        assert [len((await collect(call)).ids) for call in calls] == [8, 8]


async def test_without_a_tokenizer():
    async with world(skip_tokenizer_init=True) as w:
        assert violation(await error_of(w.stub.Generate(request("text")))) == "prompt[0].text"
        out = await collect(w.stub.Generate(request(ids=[1, 2, 3])))
        assert out.ids == [101] * 8
        assert out.text == ""
        info = await w.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert not info.has_tokenizer
        status = await error_of(w.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1])))
        assert status.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
