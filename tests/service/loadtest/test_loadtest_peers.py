"""The load test's target for OpenAI's API, against what vLLM 0.32.0's server sent, event by event."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cadenza_loadtest.driving.driver import drive
from cadenza_loadtest.failures import Failures
from tests.helpers.gateway.openai_server import DONE, Server, ask, burst, prompts, served, shape, usage

WANTED = {"num_prompt_tokens": 3, "num_output_tokens": 3}


def vllm(text: str, token_ids: list[int] | None, *, index: int = 0, finish: str | None = None) -> str:
    """A chunk of a completion; without token ids where the request wanted none."""
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "served"}
    return "data: " + json.dumps({**event, "choices": [{**choice, "token_ids": token_ids}]}) + "\n\n"


def vllm_chat(delta: dict, *, finish: str | None = None, **fields) -> str:
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "served"}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **fields}
    return "data: " + json.dumps({**event, "choices": [choice]}) + "\n\n"


async def failures_of(server: Server) -> Failures:
    failures = Failures()
    async with served(server) as target:
        await drive(burst(shape(0)), target, prompts(), timeout_s=20, on_failed=failures.add)
    return failures


async def test_two_samples_are_two_events_and_the_gaps_are_of_one() -> None:
    """Else half of the gaps would be the microseconds between two events of one step."""
    script = [
        vllm("a", [979], index=0), vllm("a", [979], index=1),
        vllm("b", [6], index=0), vllm("b", [6], index=1),
        vllm("c", [1346], index=0, finish="length"), vllm("c", [1346], index=1, finish="length"),
        usage(3, 6), DONE,
    ]  # fmt: skip
    columns = await ask(Server(*script), shape(0, **WANTED, n=2))
    assert columns.ok.all()
    assert (columns.num_output_tokens[0], columns.num_gaps[0]) == (6, 2)


async def test_a_chunk_may_hold_several_tokens() -> None:
    """It does when the server's own loop is late."""
    script = [vllm("a", [979]), vllm("b c", [6, 1346], finish="length"), usage(3, 3), DONE]
    columns = await ask(Server(*script), shape(0, **WANTED))
    assert (columns.ok[0], columns.num_output_tokens[0], columns.num_gaps[0]) == (True, 3, 1)


async def test_a_token_without_a_text_has_its_time() -> None:
    """A part of a character, or a server without its tokenizer; token ids not requested."""
    script = [vllm("", None), vllm("", None), vllm("", None, finish="length"), usage(3, 3), DONE]
    columns = await ask(Server(*script), shape(0, **WANTED), plain_fields=True)
    assert (columns.ok[0], columns.num_output_tokens[0], columns.num_gaps[0]) == (True, 3, 2)


async def test_an_end_of_text_is_a_token_that_comes_with_the_end() -> None:
    server = Server(vllm("a", None), vllm("b", None), vllm("", None, finish="stop"), usage(3, 3), DONE)
    columns = await ask(server, shape(0, **WANTED), plain_fields=True)
    assert (columns.num_output_tokens[0], columns.num_gaps[0]) == (3, 2)
    assert columns.last_s[0] == pytest.approx(columns.first_s[0] + columns.gap_s.sum(), abs=1e-6)


async def test_what_opens_a_chat_is_no_token() -> None:
    script = [
        vllm_chat({"role": "assistant", "content": ""}),
        vllm_chat({"content": "Hello"}, token_ids=[979]),
        vllm_chat({"content": "!"}, token_ids=[6]),
        vllm_chat({"content": " How"}, finish="length", token_ids=[1346]),
        usage(5, 3), DONE,
    ]  # fmt: skip
    columns = await ask(Server(*script), shape(0, **WANTED, prompt_text="hello"), endpoint="chat")
    assert (columns.ok[0], columns.num_output_tokens[0], columns.num_gaps[0]) == (True, 3, 2)


async def test_runs_have_salts_of_their_own() -> None:
    """vLLM keeps blocks from run to run: the same command again would find all of its prompts."""
    server = Server(vllm("a", [979], finish="length"), usage(3, 1), DONE)
    async with served(server) as target:
        for _ in range(2):
            target.new_run()
            await drive(burst(shape(0), shape(1)), target, prompts(), timeout_s=20)
    salts = [body["cache_salt"] for body in server.bodies]
    assert salts[0] == salts[1] != salts[2] == salts[3]


async def test_the_servers_version_is_reported() -> None:
    server = Server(DONE)
    server.version = "0.32.0"
    async with served(server) as target:
        assert target.facts.version == "0.32.0"
    async with served(Server(DONE)) as target:
        assert target.facts.version == ""


NO_MODEL = "The model `nope` does not exist. Valid aliases: served."
OUT = "Token id 5000 is out of vocabulary"


@pytest.mark.parametrize(
    ("status", "refusal", "said"),
    [
        (404, {"error": {"message": NO_MODEL, "type": "NotFoundError", "param": "model", "code": 404}}, NO_MODEL),
        (400, {"error": "no such field"}, "no such field"),
        (401, {"detail": "Not authenticated"}, "Not authenticated"),
        (422, {"detail": [{"loc": ["body"], "msg": "m"}]}, '[{"loc": ["body"], "msg": "m"}]'),
        (503, {"object": "error", "message": "busy", "code": 503}, "busy"),
        (500, {}, "{}"),
    ],
)
async def test_a_refusal_is_reported_in_the_servers_words(status, refusal, said) -> None:
    server = Server(status=status)
    server.refusal = refusal
    assert (await failures_of(server)).messages == {f"HTTP_{status}": said}


async def test_a_stream_may_be_nothing_but_an_error() -> None:
    """With the status 200: vLLM sees ids outside of its vocabulary only then."""
    error = {"error": {"message": OUT, "type": "BadRequestError", "param": None, "code": 400}}
    failures = await failures_of(Server(f"data: {json.dumps(error)}\n\n", DONE))
    assert (failures.errors, failures.messages) == ({"HTTP_400": 1}, {"HTTP_400": OUT})


async def test_a_page_is_no_stream() -> None:
    server = Server()
    server.page = "<html>Welcome</html>"
    assert (await failures_of(server)).messages == {"BAD_RESPONSE": "text/html: <html>Welcome</html>"}


async def test_a_broken_connection_and_a_truncated_answer_are_reported() -> None:
    server = Server(vllm("a", [979]))
    assert list((await failures_of(server)).messages) == ["INCOMPLETE"]
    server.cut = True
    (message,) = (await failures_of(server)).messages.values()
    assert message


async def test_tokens_after_which_the_connection_breaks_keep_their_times() -> None:
    server = Server(vllm("a", [979]), vllm("b", [6]))
    server.cut = True
    columns = await ask(server)
    assert columns.num_output_tokens[0] == 2
    assert np.isfinite(columns.last_s[0])
