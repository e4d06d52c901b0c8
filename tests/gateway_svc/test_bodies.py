"""Long bodies: whose turn it is, the processes that read them, and the counts that are checked where they are read."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal

import pytest

from gateway_svc.dialects import inference_pb2, vllm_engine_pb2
from gateway_svc.fields import limits
from gateway_svc.http import reading
from gateway_svc.http.bodies.apart import LongBodies, is_cheap
from gateway_svc.http.bodies.parsing import read_object
from gateway_svc.http.bodies.shares import Shares
from gateway_svc.http.errors import ApiError
from gateway_svc.kserve.requests import read_wire
from gateway_svc.requests.chat import read_chat
from gateway_svc.requests.completions import read_completion
from gateway_svc.requests.messages import read_count, read_messages
from gateway_svc.requests.request import GatewayRequest
from gateway_svc.requests.responses import read_response
from gateway_svc.requests.tokens import read_detokenize, read_tokenize
from gateway_svc.scheduler.generation import Generation
from gateway_svc.vllm.parameters import read_params

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "hi"}


async def entered(shares: Shares, who: str, amount: int, leave: asyncio.Event, order: list[str]) -> None:
    async with shares.taken(who, amount):
        order.append(who)
        await leave.wait()


async def test_one_caller_has_half_and_another_has_room_at_once():
    shares, leave, order = Shares(8, "bodies"), asyncio.Event(), list[str]()
    tasks = [asyncio.create_task(entered(shares, "a", 2, leave, order)) for _ in range(4)]
    await asyncio.sleep(0)
    assert (order, shares.num_used, shares.num_waiting) == (["a", "a"], 4, 2)
    tasks += [asyncio.create_task(entered(shares, "b", 2, leave, order))]
    await asyncio.sleep(0)
    assert order == ["a", "a", "b"]
    leave.set()
    await asyncio.gather(*tasks)
    assert (shares.num_used, shares.num_waiting, len(order)) == (0, 0, 5)


async def test_those_who_wait_take_turns_and_one_who_leaves_frees_its_place():
    shares, leave, order = Shares(2, "bodies"), asyncio.Event(), list[str]()
    first = asyncio.create_task(entered(shares, "a", 1, leave, order))
    waiting = {}
    for name in ("a", "a", "b", "b"):
        waiting.setdefault(name, []).append(asyncio.create_task(entered(shares, name, 1, asyncio.Event(), order)))
        await asyncio.sleep(0)
    assert order == ["a", "b"]
    waiting["b"][0].cancel()
    waiting["a"][0].cancel()
    await asyncio.gather(waiting["b"][0], waiting["a"][0], return_exceptions=True)
    await asyncio.sleep(0)
    assert order == ["a", "b", "b"]
    leave.set()
    await first
    await asyncio.sleep(0)
    assert order == ["a", "b", "b", "a"]
    for task in (waiting["a"][1], waiting["b"][1]):
        task.cancel()
    await asyncio.gather(waiting["a"][1], waiting["b"][1], return_exceptions=True)
    assert (shares.num_used, shares.num_waiting) == (0, 0)


async def test_too_many_that_wait_are_refused():
    shares, leave, order = Shares(1, "bodies", max_waiting=2), asyncio.Event(), list[str]()
    tasks = [asyncio.create_task(entered(shares, "a", 1, leave, order)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="1 bodies wait already") as error:
        async with shares.taken("a", 1):
            pass
    assert (error.value.status, error.value.headers) == (429, {"Retry-After": "1"})
    leave.set()
    await asyncio.gather(*tasks)


@pytest.fixture
async def bodies():
    it = LongBodies(1024)
    yield it
    await it.close()


def its_pid(raw: bytes) -> int:
    return os.getpid()


def dies(raw: bytes) -> None:
    os.kill(os.getpid(), int(raw))


def takes_memory(raw: bytes) -> int:
    return len(bytes(2**31))


def has_a_bug(raw: bytes) -> None:
    raise KeyError(raw)


async def test_each_body_has_a_process_that_may_die(bodies):
    first, second = await bodies.read("a", its_pid, b""), await bodies.read("a", its_pid, b"x" * 10_000_000)
    assert len({first, second, os.getpid()}) == 3
    for read, raw in ((dies, b"9"), (dies, b"11"), (takes_memory, b"")):
        with pytest.raises(ApiError, match="cannot be read within 512 MiB of memory and 10 s") as error:
            await bodies.read("a", read, raw)
        assert error.value.status == 413
    with pytest.raises(RuntimeError, match="KeyError"):
        await bodies.read("a", has_a_bug, b"")
    assert await bodies.read("a", its_pid, b"") != first


async def test_the_process_that_forks_is_replaced(bodies):
    await bodies.read("a", its_pid, b"")
    bodies._process.kill()
    bodies._process.wait()
    assert await bodies.read("a", its_pid, b"") != os.getpid()


def waits(raw: bytes) -> None:
    signal.pause()


async def test_a_share_stays_taken_until_its_process_has_ended(bodies):
    task = asyncio.create_task(bodies.read("a", waits, b""))
    while not bodies.readings.num_used:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bodies.readings.num_used == 1
    await bodies.close()
    assert bodies.readings.num_used == 0


CASES = {
    "chat": (read_chat, {"messages": [USER] * 100_000}, "messages has 100000 entries; at most 512"),
    "tokenize": (read_tokenize, {"messages": [USER] * 513}, "messages has 513 entries; at most 512"),
    "messages": (read_messages, {"max_tokens": 1, "messages": [USER] * 2049}, "messages has 2049 entries"),
    "count": (read_count, {"messages": [USER] * 2049}, "messages has 2049 entries"),
    "responses": (read_response, {"input": [USER] * 2049}, "input has 2049 entries"),
    "metadata": (
        read_response,
        {"input": "a", "metadata": {str(i): "" for i in range(513)}},
        "metadata has 513 entries",
    ),
    "completions": (read_completion, {"prompt": [5] * 131_073}, "a prompt has over 131072 token ids"),
    "several": (read_completion, {"prompt": [[5], [5] * 131_073]}, "a prompt has over 131072 token ids"),
    "detokenize": (read_detokenize, {"tokens": [5] * 131_073}, "tokens has 131073 entries"),
    "logit_bias": (
        read_completion,
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(2049)}},
        "logit_bias has 2049",
    ),
    "stop": (
        read_messages,
        {"max_tokens": 1, "messages": [USER], "stop_sequences": ["a"] * 129},
        "stop_sequences has 129",
    ),
    "bad_words": (read_chat, {"messages": [USER], "bad_words": ["a"] * 129}, "bad_words has 129 entries"),
    "schema": (
        read_chat,
        {"messages": [USER], "structured_outputs": {"regex": "a" * 262_145}},
        "structured_outputs has 262145 characters; at most 262144",
    ),
    "documents": (read_chat, {"messages": [USER], "documents": [{"text": "a"}] * 1025}, "documents has 1025 entries"),
    "calls": (
        read_chat,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 513}]},
        "messages have over 512 tool_calls in all",
    ),
    "tools": (
        read_chat,
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "description": "a" * 1_048_576}}],
        },
        "tools have over 1048576 characters in all",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_counts_are_refused_where_a_body_is_read(name):
    read, body, message = CASES[name]
    with pytest.raises(ApiError, match=message) as error:
        read_object(read, json.dumps(body).encode())
    assert error.value.status == 400
    assert error.value.param == message.partition(" ")[0] or name in ("completions", "several")


def test_limits_are_the_schedulers():
    from scheduler_svc.convert.limits import LIMITS, MAX_TOOL_CALLS
    from scheduler_svc.requests.tokenizer import MAX_PROMPT_TOKENS

    for name, most in limits.MAX_ENTRIES.items():
        assert LIMITS[f"SamplingParams.{name}"].items == most
    assert LIMITS["Chat.messages"].items == limits.MAX_MESSAGES
    assert LIMITS["Chat.documents"].items == limits.MAX_DOCUMENTS
    assert (LIMITS["Chat.tools"].items, LIMITS["Chat.tools"].total) == (limits.MAX_TOOLS, limits.MAX_TOOL_CHARS)
    assert LIMITS["GrammarSpec.regex"].length == limits.MAX_CONSTRAINT_CHARS
    assert (MAX_TOOL_CALLS, MAX_PROMPT_TOKENS) == (limits.MAX_CALLS, limits.MAX_PROMPT_TOKENS)


async def test_the_grpc_dialects_long_messages_are_read_there_too(bodies):
    params = vllm_engine_pb2.SamplingParams(stop=["a"] * 129)
    with pytest.raises(ApiError, match=r"sampling_params\.stop has 129 entries"):
        await bodies.read("a", read_params, params.SerializeToString())
    message = inference_pb2.ModelInferRequest(raw_input_contents=[b"a"])
    with pytest.raises(ApiError, match="there are 1 raw_input_contents for 0 inputs"):
        await bodies.read("a", read_wire, message.SerializeToString())


def test_what_is_read_on_the_loop_is_short_and_has_few_values():
    assert is_cheap(b'{"prompt": "' + b"a" * 60_000 + b'"}')
    assert not is_cheap(b'{"prompt": "' + b"a" * 70_000 + b'"}')
    assert not is_cheap(b"[" + b"5," * 5000 + b"5]")


async def test_a_body_that_stops_coming_is_408_and_holds_no_room(g, monkeypatch):
    monkeypatch.setattr(reading, "_SILENCE_S", 0.05)
    host, port = g.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert g.state.long_bodies.room.num_used == 0
    writer.close()


async def test_a_body_over_the_limit_is_refused_by_its_length(g):
    host, port = g.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n")
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_what_a_refused_long_body_held_is_free_at_once(g):
    body = {"messages": [{**USER, "content": "a, " * 200_000}], "max_tokens": 1}
    await g.post("/v1/chat/completions", body, 400)
    gc.collect()
    gc.disable()
    try:
        await g.post("/v1/chat/completions", body, 400)
        async with asyncio.timeout(10):
            while any(isinstance(each, (GatewayRequest, Generation)) for each in gc.get_objects()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
