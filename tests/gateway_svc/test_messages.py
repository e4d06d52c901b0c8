"""POST /v1/messages and /v1/messages/count_tokens, as /v1/responses/input_tokens, and /tokenize and /detokenize."""

from __future__ import annotations

import pytest

from tests.helpers.models.toy_tokenizers import byte_level, hf_byte_level

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hello"}
BODY = {"model": "toy", "max_tokens": 50, "messages": [USER], "system": "Be brief."}
SIMULATED = {**BODY, "model": "simulated"}


async def test_a_message(w, g):
    answer = await g.post(PATH, {**BODY, "max_tokens": 3}, anthropic_version="2026-10-21", x_api_key="any")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "toy")
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    rendered = hf_byte_level().apply_chat_template(
        [{"role": "system", "content": "Be brief."}, USER], add_generation_prompt=True, return_dict=False
    )
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(rendered)
    assert usage["output_tokens"] == 3
    counted = await g.post(f"{PATH}/count_tokens", {name: BODY[name] for name in ("model", "messages", "system")})
    assert counted == {"input_tokens": len(rendered)}
    asked = {"model": "toy", "input": [USER], "instructions": "Be brief.", "text": {"format": {"type": "json_object"}}}
    counted = await g.post("/v1/responses/input_tokens", asked)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(rendered)}
    for wrong, param in (({"input": 3}, "input"), ({}, "input"), ({"input": "x", "previous_response_id": "r"}, None)):
        error = (await g.post("/v1/responses/input_tokens", wrong, 400))["error"]
        assert error["param"] == (param or "previous_response_id")


async def test_a_streamed_message_has_anthropics_events(simulated):
    whole = await simulated.post(PATH, {**SIMULATED, "max_tokens": 5, "temperature": 0})
    events = await simulated.events(PATH, {**SIMULATED, "max_tokens": 5, "temperature": 0})
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] > 0
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 5


async def test_a_stop_sequence_is_named(simulated):
    text = (await simulated.post(PATH, {**SIMULATED, "max_tokens": 5, "temperature": 0}))["content"][0]["text"]
    stop = text[2:4]
    answer = await simulated.post(PATH, {**SIMULATED, "max_tokens": 5, "temperature": 0, "stop_sequences": [stop]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert stop not in answer["content"][0]["text"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "f"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]}, "messages[0].content"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "shema": {}}}}, "output_config.format"),
        ({"nothing": 1}, "nothing"),
    ],
)
async def test_what_is_wrong_is_named_in_anthropics_shape(shared_gateway, change, named):
    answer = await shared_gateway.post(PATH, {**BODY, **change}, 400)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]
    assert answer["request_id"]


async def test_texts_and_chats_are_tokenized_and_back(g):
    answer = await g.post("/tokenize", {"prompt": "Hello there", "return_token_strs": True})
    ids = byte_level().encode("Hello there")
    assert (answer["tokens"], answer["count"], "".join(answer["token_strs"])) == (ids, len(ids), "Hello there")
    assert answer["max_model_len"] == 256
    assert (await g.post("/detokenize", {"tokens": ids})) == {"prompt": "Hello there"}
    chat = await g.post("/tokenize", {"messages": [USER]})
    assert chat["tokens"] == hf_byte_level().apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    for body in ({}, {"prompt": "a", "messages": [USER]}, {"prompt": "a", "tools": [1]}):
        await g.post("/tokenize", body, 400)
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": ids}),
        (f"{PATH}/count_tokens", {"messages": [USER]}),
    ):
        answer = await g.post(path, {**body, "model": "other"}, 404)
        assert answer["error"]["type"] == "not_found_error"
        await g.post(path, {**body, "model": "toy"})
    for body in ({}, {"tokens": [-1]}, {"tokens": [2**40]}, {"tokens": [10**6]}, {"tokens": ["a"]}):
        assert (await g.post("/detokenize", body, 400))["error"]["param"] == "tokens"
