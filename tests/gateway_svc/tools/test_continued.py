"""Answers that go on where a message ends, logprobs of items, large bodies, and Qwen3-Coder, before a scheduler."""

from __future__ import annotations

import pytest

from gateway_svc.http.bodies.apart import LongBodies
from tests.helpers.gateway.gateway import gateway
from tests.helpers.models.chat_templates import TIME
from tests.helpers.models.tool_models import call_text, hermes_tokenizer, scripts
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Weather?"}
FLAT = [{"type": "function", **TIME["function"]}]


def turn(text):
    return {"role": "assistant", "content": text}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "written", "thought", "content"),
    [
        ("<think>We", "ll.</think>Yes", "ll.", "Yes"),
        ("<think>Well.</think>Ye", "s</think>", None, "s</think>"),
        ("Yes", " and</think> no", None, " and</think> no"),
    ],
)
async def test_a_continued_answer_is_read_on_each_api(hermes, before, written, thought, content):
    hermes.script(written)
    options = {"messages": [USER, turn(before)], "seed": 1}
    body = options | {"continue_final_message": True, "add_generation_prompt": False}
    message = (await hermes.post(CHAT, body))["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (thought, content)
    echoed = (await hermes.post(CHAT, body | {"echo": True}))["choices"][0]["message"]
    if thought is None:
        assert echoed["content"] == before + content
    else:
        assert (echoed["reasoning"], echoed["content"]) == ("Well.", "Yes")
    events = await hermes.events(CHAT, body | {"echo": True})
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == echoed["content"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == echoed.get("reasoning", "")
    plain = {"model": "toy", "max_tokens": 60, "messages": options["messages"]}
    answer = await hermes.post(MESSAGES, plain | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    blocks = [(block["type"], block.get("thinking") or block.get("text")) for block in answer["content"]]
    assert blocks == [*([("thinking", thought)] if thought else []), ("text", content)]


async def test_an_echoed_message_that_is_not_continued_is_content(hermes_folder):
    async with (
        world(ScriptedExecutor(max_model_len=2048), tokenizer=hermes_folder) as w,
        gateway(w.target, reasoning_parser="deepseek_r1") as g,
    ):
        scripts(w, hermes_tokenizer())("Well.</think>Yes")
        body = {"messages": [USER, turn("Hm")], "seed": 1, "echo": True}
        message = (await g.post(CHAT, body))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Well.", "HmYes")


async def test_logprobs_belong_to_the_item_that_their_tokens_made(hermes):
    texts = ["<think>Well.</think>", "I look", "\n" + call_text("get_time", {})]
    ids = hermes.script("".join(texts))
    num_before = len(hermes_tokenizer().encode(texts[0], add_special_tokens=False))
    num_content = len(hermes_tokenizer().encode(texts[1], add_special_tokens=False))
    assert hermes_tokenizer().encode("".join(texts[:2]), add_special_tokens=False) == ids[: num_before + num_content]
    body = {"input": "Hi", "tools": FLAT, "seed": 1, "include": ["message.output_text.logprobs"]}
    answer = await hermes.post(RESPONSES, body)
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    (part,) = answer["output"][1]["content"]
    assert "".join(row["token"] for row in part["logprobs"]) == part["text"] == "I look"
    assert len(part["logprobs"]) == num_content
    events = await hermes.events(RESPONSES, body)
    rows = [row for event in events if event["type"] == "response.output_text.delta" for row in event["logprobs"]]
    assert rows == part["logprobs"]
    plain = await hermes.post(RESPONSES, body | {"tools": []})
    (part,) = plain["output"][1]["content"]
    assert len(part["logprobs"]) == plain["usage"]["output_tokens"] - num_before, "with the one that ends it"


async def test_large_bodies_are_read_off_the_loop(hermes, monkeypatch):
    hermes.script("Yes")
    apart, read = list[str](), LongBodies.read

    async def recorded(bodies, who, function, raw):
        apart.append(who)
        return await read(bodies, who, function, raw)

    monkeypatch.setattr(LongBodies, "read", recorded)
    for size, num_apart in ((10, 0), (70_000, 4)):
        text = "a" * size
        expected = 200 if size == 10 else 400  # the model has no room for it
        await hermes.post(RESPONSES, {"input": text, "seed": 1}, expected)
        turns = [{"role": "user", "content": text}]
        await hermes.post(MESSAGES, {"model": "toy", "max_tokens": 9, "messages": turns}, expected)
        await hermes.post(f"{MESSAGES}/count_tokens", {"model": "toy", "messages": turns})
        await hermes.post("/tokenize", {"messages": turns})
        assert len(apart) == num_apart


async def test_qwen_coders_arguments_are_what_their_schema_says(hermes_folder):
    number = {"type": "object", "properties": {"days": {"type": "integer"}, "city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": number}}]
    written = "<function=f>\n<parameter=days>\n5\n</parameter>\n<parameter=city>\n5\n</parameter>\n</function>"
    async with (
        world(ScriptedExecutor(max_model_len=2048), tokenizer=hermes_folder) as w,
        gateway(w.target, tool_call_parser="qwen3_coder") as g,
    ):
        scripts(w, hermes_tokenizer())(f"I look.\n<tool_call>\n{written}\n</tool_call>")
        (choice,) = (await g.post(CHAT, {"messages": [USER], "tools": tools, "seed": 1}))["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
        assert call["function"] == {"name": "f", "arguments": '{"days": 5, "city": "5"}'}
        events = await g.events(CHAT, {"messages": [USER], "tools": tools, "seed": 1})
        deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
        pieces = [each["function"]["arguments"] for delta in deltas for each in delta.get("tool_calls", ())]
        assert "".join(pieces) == call["function"]["arguments"]
        assert len(pieces) > 5
