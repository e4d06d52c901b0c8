"""The load test's target for OpenAI's API, against a server that speaks it well and badly."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest
from aiohttp import web

from cadenza.errors import CadenzaError, UnavailableError
from cadenza_loadtest.driving.driver import drive
from cadenza_loadtest.driving.live import RequestInFlight
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.settings import make_settings
from cadenza_loadtest.targets import make_target
from cadenza_loadtest.targets.cadenza import GenerateTarget
from cadenza_loadtest.targets.openai import EventParser, OpenAITarget
from cadenza_loadtest.targets.session import SessionTarget
from tests.helpers.gateway.openai_server import DONE, Server, ask, burst, chunk, prompts, served, shape, until, usage


async def test_a_completion_is_streamed() -> None:
    server = Server(chunk("a"), chunk("b"), chunk("c", finish="length"), usage(4, 3, cached=2), DONE)
    async with served(server, api_key="secret") as target:
        columns = await drive(burst(shape(0)), target, prompts(), timeout_s=20)
        assert (target.facts.kind, target.facts.model, target.facts.max_model_len) == ("openai", "m1", 99)
        assert target.facts.target.endswith("/v1")
    assert columns.ok.all()
    assert (columns.num_output_tokens[0], columns.num_prompt_tokens[0], columns.num_cached_tokens[0]) == (3, 4, 2)
    assert 0 < columns.due_s[0] + columns.sent_s[0] < columns.first_s[0] <= columns.last_s[0]
    assert np.isnan(columns.server_first_s[0])
    assert server.keys == ["Bearer secret"]
    (body,) = server.bodies
    assert body["prompt"] == prompts().token_ids(shape(0))
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m1", 5, True)
    assert body["stream_options"] == {"include_usage": True}
    assert (body["ignore_eos"], body["min_tokens"], body["return_token_ids"]) == (True, 5, True)
    assert server.paths == ["/v1/completions"]


async def test_a_chat_is_streamed() -> None:
    first = "data: " + json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}) + "\n\n"
    server = Server(first, *(chunk(each, chat=True) for each in "xyz"), chunk(chat=True, finish="length"), DONE)
    columns = await ask(server, shape(0, prompt_text="Hi", tenant="t", n=2), endpoint="chat", plain_fields=True)
    assert columns.ok.all()
    assert columns.num_output_tokens[0] == 3, "the role alone, and the end, are no tokens"
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (body["n"], body["user"], body["temperature"]) == (2, "t", 1.0)
    assert not {"ignore_eos", "min_tokens", "return_token_ids", "cache_salt", "prompt"} & set(body)
    assert server.paths == ["/v1/chat/completions"]


async def test_token_ids_are_counted_where_they_are_sent_and_usage_corrects_the_rest() -> None:
    server = Server(chunk("ab", token_ids=[1, 2]), chunk("", token_ids=[3]), chunk("c", token_ids=[4, 5], finish="x"))
    columns = await ask(server)
    assert (columns.error[0], columns.num_output_tokens[0]) == ("", 5)
    guessed = Server(chunk("ab"), chunk(""), chunk("c", finish="length"), usage(4, 5), DONE)
    columns = await ask(guessed)
    assert columns.num_output_tokens[0] == 5
    silent = Server(chunk(""), chunk("", finish="length"), usage(4, 2), DONE)
    columns = await ask(silent)
    assert (columns.ok[0], columns.num_output_tokens[0], columns.num_gaps[0]) == (True, 2, 1)
    assert np.isfinite(columns.first_s[0])


async def test_turns_over_http_carry_answers_as_ids_or_as_text() -> None:
    talk = [shape(turn, session=0, turn=turn) for turn in range(2)]
    server = Server(chunk("ab", token_ids=[7, 8]), DONE)
    columns = await ask(server, *talk)
    assert columns.ok.all()
    assert server.bodies[1]["prompt"] == [*server.bodies[0]["prompt"], 7, 8, *prompts().token_ids(talk[1])]
    server = Server(chunk("ab"), chunk("cd"), DONE)
    said = [shape(turn, session=0, turn=turn, prompt_text=f"t{turn}") for turn in range(2)]
    await ask(server, *said)
    assert server.bodies[1]["prompt"] == "t0abcd t1"


async def test_events_may_be_cut_anywhere_and_be_dressed_up() -> None:
    whole = (
        ": a comment\r\n\r\nevent: x\r\nid: 3\r\n" + chunk("é").replace("\n", "\r\n") + ": ping\n\n" + chunk("b") + DONE
    )
    data = whole.encode()
    server = Server(*(data[at : at + 1] for at in range(len(data))))
    columns = await ask(server)
    assert (columns.error[0], columns.num_output_tokens[0]) == ("", 2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("script", "error", "num_tokens"),
    [
        ((chunk("a"), 'data: {"error": {"message": "boom", "code": 503}}\n\n'), "HTTP_503", 1),
        ((chunk("a"), 'data: {"error": {"message": "boom", "code": "boom"}}\n\n', DONE), "SERVER_ERROR", 1),
        ((chunk("a"), 'data: {"object": "error", "message": "boom", "code": 400}\n\n'), "HTTP_400", 1),
        ((chunk("a"), chunk("b")), "INCOMPLETE", 2),
        ((chunk("a"), "data: {not json}\n\n", DONE), "BAD_RESPONSE", 1),
        ((chunk("a"), "data: [1]\n\n", DONE), "BAD_RESPONSE", 1),
        (('{"choices": []}',), "INCOMPLETE", 0),
        ((), "INCOMPLETE", 0),
    ],
)
async def test_an_error_in_a_stream_is_reported_by_its_code(script, error, num_tokens) -> None:
    columns = await ask(Server(*script))
    assert (columns.error[0], columns.num_output_tokens[0]) == (error, num_tokens)


async def test_a_stream_that_ends_without_done_is_whole_if_its_choice_is() -> None:
    columns = await ask(Server(chunk("a", finish="stop")))
    assert columns.ok.all()


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_a_refusal_is_reported_by_its_status(status) -> None:
    server = Server(status=status)
    columns = await ask(server, shape(0), shape(1))
    assert columns.error.tolist() == [f"HTTP_{status}"] * 2
    assert len(server.bodies) == 2, "nothing is sent again"


async def test_a_connection_that_breaks() -> None:
    server = Server(chunk("a"))
    server.cut = True
    columns = await ask(server)
    assert columns.error.tolist() == ["CONNECTION"]
    assert columns.num_output_tokens[0] == 1


async def test_a_server_that_has_gone() -> None:
    async with served(Server()) as target:
        pass
    target = OpenAITarget(target.url)
    with pytest.raises(UnavailableError, match="no server at http://127"):
        await target.start()


async def test_requests_wait_for_no_connection() -> None:
    """aiohttp by itself opens 100 at most: the rest would wait here unseen."""
    server = Server(chunk("a", finish="length"), DONE)
    server.going.clear()
    async with served(server) as target:
        running = asyncio.create_task(drive(burst(*map(shape, range(150))), target, prompts(), timeout_s=60))
        await until(lambda: len(server.bodies) == 150)
        server.going.set()
        columns = await running
        assert columns.ok.all()
        # And connections are used again.
        known = set(server.ports)
        for index in range(5):
            await drive(burst(shape(index)), target, prompts(), timeout_s=20)
        assert server.ports == known


async def test_with_few_connections_a_request_waits_for_one_and_that_is_its_lag() -> None:
    server = Server(chunk("a", finish="length"), DONE)
    server.going.clear()
    async with served(server, connections=2) as target:
        running = asyncio.create_task(drive(burst(*map(shape, range(5))), target, prompts(), timeout_s=60))
        await until(lambda: len(server.bodies) == 2)
        server.going.set()
        columns = await running
    assert columns.ok.all()
    assert len(server.bodies) == 5
    assert len(server.ports) <= 2
    # In the order in which they came; those that had to wait were sent once others had ended.
    assert columns.sent_s.argsort(kind="stable").tolist() == [0, 1, 2, 3, 4]
    assert columns.sent_s[2:].min() > columns.sent_s[:2].max()
    assert columns.sent_s[2:].min() >= columns.last_s[:2].min()
    assert columns.sent_s.max() <= columns.last_s.max()


async def test_a_timeout_while_waiting_for_a_connection_sends_nothing() -> None:
    server = Server(chunk("a", finish="length"), DONE)
    server.going.clear()
    async with served(server, connections=1) as target:
        columns = await drive(burst(shape(0), shape(1)), target, prompts(), timeout_s=0.3)
    assert columns.error.tolist() == ["TIMEOUT", "TIMEOUT"]
    assert len(server.bodies) == 1
    assert np.isnan(columns.sent_s).tolist() == [False, True]


async def test_a_timeout_closes_the_connection() -> None:
    server = Server(DONE)
    server.going.clear()
    async with served(server) as target:
        columns = await drive(burst(shape(0)), target, prompts(), timeout_s=0.3)
        await until(lambda: server.closed_early == 1)
    assert columns.error.tolist() == ["TIMEOUT"]


async def test_what_the_api_lacks_is_not_sent() -> None:
    server = Server(DONE)
    columns = await ask(server, shape(0, beam_width=3))
    assert columns.error.tolist() == ["UNSUPPORTED"]
    columns = await ask(server, shape(0), endpoint="chat")
    assert columns.error.tolist() == ["UNSUPPORTED"]
    assert not server.bodies


async def test_the_model_is_fetched_or_given() -> None:
    async with served(Server(), model="m2") as target:
        assert (target.facts.model, target.facts.max_model_len, target.facts.vocab_size) == ("m2", None, None)
    for meta, size in (({"n_vocab": 2048}, 2048), ({"n_vocab": "x"}, None), ({"n_vocab": 0}, None), (None, None)):
        async with served(Server(models={"data": [{"id": "m", "meta": meta}]})) as target:
            assert target.facts.vocab_size == size, meta
    async with served(Server(models={"data": []}), model="mine") as target:
        assert target.facts.model == "mine"
    for models in ({"data": []}, {"no": 1}, ["x"]):
        with pytest.raises(CadenzaError, match="give --served-model-name"):
            async with served(Server(models=models)):
                pass


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://host/v1", "http://", "http://host:0/v1", "http://host:x", "http://h/v1?a=1"]
)
def test_a_url_that_is_none_is_refused(url) -> None:
    with pytest.raises(LoadTestError, match=r"--url .* must be a base URL"):
        OpenAITarget(url)


def test_urls() -> None:
    assert OpenAITarget("http://host:80").url == "http://host:80/v1"
    assert OpenAITarget("https://host/api/v1/").url == "https://host/api/v1"


def test_settings_name_the_target() -> None:
    assert isinstance(make_target(make_settings({}), "127.0.0.1:1"), SessionTarget)
    assert isinstance(make_target(make_settings({"api": "generate"}), "127.0.0.1:1"), GenerateTarget)
    settings = make_settings({"url": "http://h", "api_key_variable": "KEY", "endpoint": "chat"})
    target = make_target(settings, "http://h", {"KEY": "k"})
    assert isinstance(target, OpenAITarget)
    assert target._headers == {"Authorization": "Bearer k"}


@pytest.mark.parametrize("api", ["session", "generate"])
async def test_settings_say_how_many_connections(api) -> None:
    for given, count in ((None, 1), (3, 3)):
        target = make_target(make_settings({"api": api, "connections": given}), "127.0.0.1:1")
        assert len(target._clients) == count
        await target.close()


# ---------------------------------------------------------------- events


EVENTS = (
    ("data: a\n\n", ["a"]),
    ("data:a\n\ndata:  b\n\n", ["a", " b"]),
    ("data: a\ndata: b\n\n", ["a\nb"]),
    ("data\n\n", [""]),
    (":x\n\nevent: e\nid: 1\nretry: 2\n\ndata: a\n\n", ["a"]),
    ("data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
    ("\ufeffdata: 你好\n\n", ["你好"]),
    ("data: a\n", []),
    ("database: a\n\ndata: a:b\n\n", ["a:b"]),
    ("data: a\u2028b\n\n", ["a\u2028b"]),
)


@pytest.mark.parametrize(("text", "events"), EVENTS)
def test_events_are_parsed_as_the_standard_says_wherever_they_are_cut(text, events) -> None:
    data = text.encode()
    for size in (1, 2, 3, 5, len(data)):
        parser = EventParser()
        found = [each for at in range(0, len(data), size) for each in parser.feed(data[at : at + size])]
        assert found == events, size


async def test_time_is_taken_when_a_chunk_is_here() -> None:
    """The server holds the second one back until the first was counted."""
    server = Server()
    held = asyncio.Event()
    let_go_s: list[float] = []

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("a").encode())
        await asyncio.wait_for(held.wait(), 10)
        let_go_s.append(time.perf_counter())
        await response.write((chunk("b", finish="length") + DONE).encode())
        return response

    server.answer = answer
    async with served(server) as target:
        live = RequestInFlight(shape(0), time.perf_counter(), 4)
        running = asyncio.create_task(target.run(shape(0), [1, 2, 3, 4], live))
        await until(lambda: live.num_output_tokens == 1)
        held.set()
        await running
    assert live.error == ""
    assert live.due_s <= live.sent_s < live.first_s < let_go_s[0] <= live.last_s
