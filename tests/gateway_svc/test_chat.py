"""POST /v1/chat/completions and /v1/responses."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.gateway.gateway import chat_text
from tests.helpers.models.toy_tokenizers import hf_byte_level
from tests.helpers.scheduler.scheduler_world import script

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}


async def test_a_chat_is_answered(w, g):
    ids = script(w, "Hello there")
    messages = [{"role": "system", "content": "Be brief."}, USER]
    answer = await g.post(PATH, {"model": "toy", "messages": messages, "seed": 1})
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there", "refusal": None}
    assert choice["finish_reason"] == "stop"
    rendered = hf_byte_level().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert answer["usage"]["prompt_tokens"] == len(rendered)
    assert answer["usage"]["completion_tokens"] == len(ids) + 1


async def test_parts_are_texts(g):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    counts = []
    for content in ("Hello", parts):
        body = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 1}
        counts.append((await g.post(PATH, body))["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


async def test_a_stream_begins_with_the_role_and_has_the_same_text(simulated):
    body = {"messages": [USER], "seed": 1, "n": 2, "max_tokens": 6, "ignore_eos": True}
    events = await simulated.events(PATH, body)
    assert events[-1] == "[DONE]"
    first = dict.fromkeys((0, 1))
    for event in events[:-1]:
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            if first[choice["index"]] is None:
                first[choice["index"]] = choice["delta"]
    assert list(first.values()) == [{"role": "assistant", "content": ""}] * 2
    whole = await simulated.post(PATH, body)
    for index in (0, 1):
        assert chat_text(events, index) == whole["choices"][index]["message"]["content"] != ""
    ends = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
    assert ends == ["length", "length"]


async def test_logprobs_have_openais_entries(w, g):
    script(w, "fox", end=False)
    body = {"messages": [USER], "seed": 1, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3}
    answer = await g.post(PATH, body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 2
    streamed = await g.events(PATH, body)
    parts = [choice["logprobs"] for event in streamed[:-1] for choice in event["choices"] if choice["logprobs"]]
    assert [*itertools.chain.from_iterable(part["content"] for part in parts)] == content


async def test_the_last_message_can_be_continued_and_repeated(w, g):
    script(w, " you", end=False)
    messages = [USER, {"role": "assistant", "content": "How are"}]
    body = {"messages": messages, "seed": 1, "max_tokens": 1, "echo": True}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    answer = await g.post(PATH, body)
    assert answer["choices"][0]["message"]["content"].startswith("How are ")
    assert chat_text(await g.events(PATH, body)) == answer["choices"][0]["message"]["content"]


async def test_what_clients_send_back_of_an_answer_changes_nothing(g):
    """LiteLLM repeats an answer with its own notes (https://github.com/BerriAI/litellm/issues/25595)."""
    plain = {"role": "assistant", "content": "Hi"}
    notes = {
        "refusal": None, "annotations": [], "provider_specific_fields": {"refusal": None}, "thinking_blocks": [],
        "cache_control": {"type": "ephemeral"}, "audio": None, "function_call": None, "images": None,
    }  # fmt: skip
    texts = []
    for turn in (plain, plain | notes):
        texts.append(await g.post("/tokenize", {"messages": [USER, turn, USER]}))
    assert texts[0] == texts[1]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hello"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "refused", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 5}]}, "messages"),
        ({"messages": [{**USER, "contents": "a"}]}, "messages"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [USER], "max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"messages": [USER], "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"messages": [USER], "structured_outputs": {"jason": {}}}, "structured_outputs"),
        (
            {"messages": [USER], "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [USER], "service_tier": "priority"}, "service_tier"),
    ],
)
async def test_what_is_wrong_is_named(shared_gateway, body, param):
    error = (await shared_gateway.post(PATH, body, 400))["error"]
    assert error["param"] == param, error


@pytest.mark.slow
@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_constraint_that_nobody_can_follow_here_is_named_as_it_was_given(simulated, path):
    asked = {
        PATH: ("response_format", {"type": "json_object"}, {"messages": [USER]}),
        "/v1/completions": ("structured_outputs", {"regex": "a"}, {"prompt": "a"}),
        "/v1/responses": ("text", {"format": {"type": "json_object"}}, {"input": "a"}),
        "/v1/messages": ("output_format", {"type": "json_schema", "schema": {}}, {"messages": [USER], "max_tokens": 1}),
    }
    name, value, body = asked[path]
    error = (await simulated.post(path, {**body, name: value}, 400))["error"]
    assert error["message"].startswith(f"{name}: the executor follows no grammars")
    assert error.get("param", name) == name


async def test_fields_that_ask_for_nothing_are_accepted(g):
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True, "prediction": None,
    }  # fmt: skip
    await g.post(PATH, {"messages": [USER], "max_tokens": 1, **harmless})


async def test_a_response(w, g):
    script(w, "Hello there")
    body = {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]}
    body |= {"instructions": "Be brief.", "seed": 1, "store": False}
    answer = await g.post("/v1/responses", body)
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (item,) = answer["output"]
    assert item["content"][0]["text"] == "Hello there"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == answer["usage"]["total_tokens"]
    cut = await g.post("/v1/responses", {"input": "Hello", "max_output_tokens": 1, "seed": 1})
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_streamed_response(w, g):
    script(w, "Hello there")
    body = {"input": "Hello", "seed": 1, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = await g.events("/v1/responses", body)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events[4:-4]) == "Hello there"
    whole = events[-1]["response"]["output"][0]["content"][0]
    assert whole["text"] == "Hello there"
    assert [*itertools.chain.from_iterable(event["logprobs"] for event in events[4:-4])] == whole["logprobs"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "reasoning": {"effort": 5}}, "reasoning"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": "a", "store": 1}, "store"),
        ({"input": "a", "truncation": "left"}, "truncation"),
        ({"input": "a", "truncation": ["auto"]}, "truncation"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata"),
        ({"input": "a", "stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include"),
        ({"input": "a", "top_logprobs": 1}, "top_logprobs"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {}, "name": 5}}}, "text"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {}, "strict": "yes"}}}, "text"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text"),
    ],
)
async def test_what_is_wrong_with_a_response_is_named(shared_gateway, body, param):
    assert (await shared_gateway.post("/v1/responses", body, 400))["error"]["param"] == param


async def test_a_response_keeps_the_end_of_a_prompt_over_the_models_length_if_it_may(g):
    asked = {"input": "a" * 300, "truncation": "auto", "max_output_tokens": 2}
    answer = await g.post("/v1/responses", asked)
    assert (answer["truncation"], answer["usage"]["input_tokens"]) == ("auto", 254)
    rest = {"input": "Hello", "seed": 1}
    short, same = [await g.post("/v1/responses", {**rest, "truncation": each}) for each in ("auto", "disabled")]
    assert short["usage"] == same["usage"]
    assert (await g.post("/v1/responses", {**asked, "max_output_tokens": 256}, 400))["error"]["param"] == "truncation"
    counted = await g.post("/v1/responses/input_tokens", {"input": "a" * 300, "truncation": "auto"})
    assert counted["input_tokens"] > 300
