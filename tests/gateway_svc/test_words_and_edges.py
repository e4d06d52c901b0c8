"""Edges of requests and answers on all four APIs: 3.0 as an integer, refusals, names in errors, lines in streams."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.scheduler_world import script
from tests.helpers.scheduler.scripted_executor import EOS

USER = {"role": "user", "content": "Hello"}
BODIES = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 40},
    "/v1/chat/completions": {"messages": [USER], "stop_token_ids": [9]},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 40},
    "/v1/messages": {"messages": [USER], "max_tokens": 40},
}
INTEGERS = {
    "/v1/completions": {
        "max_tokens": 3, "n": 1, "seed": 1, "logprobs": 1, "best_of": 1, "top_k": 2, "min_tokens": 1,
        "stop_token_ids": [7], "truncate_prompt_tokens": 2, "priority": 0, "stream_interval": 1,
    },
    "/v1/chat/completions": {
        "max_completion_tokens": 3, "max_tokens": 3, "n": 1, "seed": 1, "top_k": 2, "min_tokens": 1,
        "stop_token_ids": [7], "truncate_prompt_tokens": 2, "priority": 0,
    },
    "/v1/responses": {
        "max_output_tokens": 3, "top_k": 2, "seed": 1, "stop_token_ids": [7], "min_tokens": 1, "priority": 0,
    },
    "/v1/messages": {"max_tokens": 3, "top_k": 2},
}  # fmt: skip


def with_floats(value):
    return [*map(float, value)] if isinstance(value, list) else float(value)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
async def test_three_point_zero_is_an_integer_in_every_field(w, g, path):
    script(w, "The quick brown fox")
    for name, value in INTEGERS[path].items():
        await g.post(path, BODIES[path] | {name: with_floats(value)})
        half = [*with_floats(value), 7.5] if isinstance(value, list) else value + 0.5
        error = (await g.post(path, BODIES[path] | {name: half}, 400))["error"]
        assert error.get("param", name) == name
        assert name in error["message"]
        for wrong in (True, "3", 1e400 if not isinstance(value, list) else [True]):
            text = json.dumps(BODIES[path] | {name: wrong}).replace("Infinity", "1e400")
            assert name in (await g.post(path, text, 400))["error"]["message"]


async def test_token_ids_may_be_written_so_too(w, g):
    script(w, "fox")
    plain = {"prompt": [5, 6], "seed": 1, "max_tokens": 3, "return_token_ids": True}
    whole = (await g.post("/v1/completions", plain))["choices"]
    assert (await g.post("/v1/completions", plain | {"prompt": [5.0, 6.0]}))["choices"] == whole
    assert (await g.post("/v1/completions", plain | {"prompt": [[5.0, 6]]}))["choices"] == whole
    assert "5.5" in (await g.post("/v1/completions", plain | {"prompt": [5.5]}, 400))["error"]["message"]
    assert (await g.post("/detokenize", {"tokens": [5.0, 6.0]})) == (await g.post("/detokenize", {"tokens": [5, 6]}))


async def test_refusals_of_earlier_answers_are_read_as_their_text(g):
    expected = (await g.post("/tokenize", {"messages": [USER, {"role": "assistant", "content": "No."}, USER]}))[
        "tokens"
    ]
    part = {"type": "refusal", "refusal": "No."}
    for turn in ({"content": [part]}, {"content": None, "refusal": "No."}, {"refusal": "No."}):
        found = await g.post("/tokenize", {"messages": [USER, {"role": "assistant", **turn}, USER]})
        assert found["tokens"] == expected
    mixed = {"role": "assistant", "content": [{"type": "text", "text": "N"}, {"type": "refusal", "refusal": "o."}]}
    assert (await g.post("/tokenize", {"messages": [USER, mixed, USER]}))["tokens"] == expected
    items = [USER, {"type": "message", "role": "assistant", "content": [part]}, USER]
    await g.post("/v1/responses", {"input": items, "max_output_tokens": 2})
    for bad in ({"type": "refusal"}, {"type": "refusal", "refusal": 5}, {"type": ["refusal"], "refusal": "No."}):
        turns = [USER, {"role": "assistant", "content": [bad]}, USER]
        assert (await g.post("/v1/chat/completions", {"messages": turns}, 400))["error"]["param"] == "messages"
        assert (await g.post("/v1/responses", {"input": turns}, 400))["error"]["param"] == "input"


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_model_is_answered_with_the_served_ones_name(g, path):
    for name in ("gpt-4o", "x" * 300, "a\nb"):
        for stream in (False, True):
            body = BODIES[path] | {"model": name, "stream": stream}
            error = (await g.post(path, body, 404))["error"]
            assert "'toy'" in error["message"], error
    assert "'toy'" in (await g.get("/v1/models/gpt-4o", 404))["error"]["message"]
    assert "'toy'" in (await g.post("/tokenize", {"prompt": "a", "model": "gpt-4o"}, 404))["error"]["message"]


class _ForAnySeed(dict):
    """One script: Anthropic's requests have no seed."""

    def get(self, seed, default=None):
        return self[0]


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
async def test_no_character_ends_a_line_of_a_stream(w, g, path):
    """U+2028, U+2029 and U+0085 are ends of lines to many readers of events."""
    text = "a\u2028b\u2029c\x85d"
    w.executor.scripts = _ForAnySeed({0: [*byte_level().encode(text), EOS]})
    body = BODIES[path] | {"stream": True}
    async with g.http.post(path, json=body) as response:
        raw = await response.read()
    shown = raw.decode()
    assert not {"\u2028", "\u2029", "\x85"} & set(shown)
    found = [json.loads(line.removeprefix("data: ")) for line in shown.splitlines() if line.startswith("data: {")]
    texts = "".join(
        each["choices"][0].get("text") or each["choices"][0].get("delta", {}).get("content") or ""
        if "choices" in each
        else each["delta"]
        if each.get("type") == "response.output_text.delta"
        else each["delta"].get("text", "")
        if each.get("type") == "content_block_delta"
        else ""
        for each in found
    )
    assert texts == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"GARBAGE\r\n\r\n", "no HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nBad Header\r\n\r\n", "no HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", "too long"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", "no HTTP/1.1"),
    ],
)
async def test_what_is_no_http_is_answered_in_json(g, head, says):
    host, _, port = g.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.split(b" ")[1] == b"400"
    assert b"application/json" in top
    error = json.loads(body)["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_field_that_is_too_large_is_named(g, path):
    many = {str(each): 1.0 for each in range(200_000)}
    for count in (200_000, 30_000):
        error = (await g.post(path, BODIES[path] | {"logit_bias": dict(list(many.items())[:count])}, 400))["error"]
        assert (error["param"], error["message"]) == (
            "logit_bias",
            f"logit_bias has {count} entries; at most 2048 are allowed",
        )
    error = (await g.post(path, BODIES[path] | {"logit_bias": dict(list(many.items())[:3_000])}, 400))["error"]
    assert (error["param"], error["message"]) == (
        "logit_bias",
        "logit_bias has 3000 entries; at most 2048 are allowed",
    )
    stops = ["a" * 200] * 9_000
    error = (await g.post(path, BODIES[path] | {"stop": stops}, 400))["error"]
    assert error["param"] == "stop"
    long = (
        {"prompt": "x " * 900_000} if path == "/v1/completions" else {"messages": [{**USER, "content": "x " * 900_000}]}
    )
    assert "the prompt has" in (await g.post(path, BODIES[path] | long, 413))["error"]["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty: it must be a JSON object"),
        (b" \r\n", "the body is empty: it must be a JSON object"),
        (b"'{messages:[]}'", "Expecting value: line 1 column 1 (char 0), at \"'{messages:[]}'\""),  # cmd.exe's curl
        ('{"messages": [], \u201cn\u201d: 1}'.encode(), "(char 17), at '\\u201cn\\u201d: 1}'"),
        (b'{"n": 1', "(char 7), at its end"),
        (b'{"n": 1}{"n": 2}', "Extra data: line 1 column 9 (char 8), at '{\"n\": 2}'"),
    ],
)
async def test_where_a_body_is_no_json_is_said(g, body, says):
    assert (await g.post("/v1/chat/completions", body, 400))["error"]["message"].endswith(says)
