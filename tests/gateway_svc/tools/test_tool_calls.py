"""Tools on all three APIs, with a model that writes what it is told to."""

from __future__ import annotations

import json
from unittest.mock import ANY

import pytest

from gateway_svc.anthropic.content import _object
from gateway_svc.requests.tools import chat_tools, message_tools, response_tools
from tests.helpers.models.chat_templates import TIME, WEATHER
from tests.helpers.models.tool_models import call_text, hermes_tokenizer, mistral_tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Weather?"}
TOOLS = [WEATHER, TIME]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANTHROPIC = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
TWO = "I look. " + call_text("get_weather", {"city": "天津", "days": [1, 2]}) + "\n" + call_text("get_time", {})
ARGUMENTS = [{"city": "天津", "days": [1, 2]}, {}]


def folded(events):
    """The message that a stream's deltas come to, as OpenAI's clients put it together."""
    message = {"content": "", "tool_calls": [], "reasoning": ""}
    reasons = []
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert (call["type"], call["function"]["arguments"]) == ("function", "")
                    message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message, reasons


async def test_a_chat_calls_tools(hermes):
    hermes.script(TWO)
    body = {"messages": [USER], "tools": TOOLS, "seed": 1}
    answer = await hermes.post(CHAT, body)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "get_time"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == ARGUMENTS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    streamed, reasons = folded(await hermes.events(CHAT, body))
    assert streamed["content"] == "I look."
    assert reasons == ["tool_calls"]
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]


async def test_the_prompt_has_the_tools_and_the_loop_goes_on(hermes):
    hermes.script("It is 21.")
    turn = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "天津"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [turn]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"t": 21}'},
    ]
    answer = await hermes.post(CHAT, {"messages": messages, "tools": TOOLS, "seed": 1, "return_token_ids": True})
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is 21.", "stop")
    assert "tool_calls" not in choice["message"]
    call = turn | {"function": {"name": "get_weather", "arguments": {"city": "天津"}}}
    rendered = [messages[0], {"role": "assistant", "tool_calls": [call]}, messages[2]]
    expected = hermes_tokenizer().apply_chat_template(rendered, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert answer["prompt_token_ids"] == hermes_tokenizer().encode(expected, add_special_tokens=False)
    counted = await hermes.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert counted["tokens"] == answer["prompt_token_ids"]


async def test_tool_choice_none_leaves_tools_out(hermes):
    hermes.script(TWO)
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "none", "seed": 1}
    answer = await hermes.post(CHAT, body)
    assert answer["choices"][0]["message"]["content"] == TWO
    assert answer["choices"][0]["finish_reason"] == "stop"
    without = await hermes.post("/tokenize", {"messages": [USER]})
    assert answer["usage"]["prompt_tokens"] == without["count"]


async def test_a_call_that_is_cut(hermes):
    ids = hermes.script(call_text("get_weather", {"city": "a" * 40}))
    body = {"messages": [USER], "tools": TOOLS, "seed": 1, "max_tokens": len(ids) - 12}
    answer = await hermes.post(CHAT, body)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith('{"city": "aaa')
    streamed, reasons = folded(await hermes.events(CHAT, body))
    assert reasons == ["length"]
    assert streamed["tool_calls"][0]["arguments"] == call["function"]["arguments"]


async def test_special_tokens_mark_calls_and_stay_out_of_texts(mistral):
    mistral.script('Yes[TOOL_CALLS]get_weather[ARGS]{"city": "a"}[TOOL_CALLS]get_time[ARGS]{}')
    body = {"messages": [USER], "tools": TOOLS, "seed": 1, "logprobs": True}
    answer = await mistral.post(CHAT, body)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Yes"
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": '{"city": "a"}'}, {"name": "get_time", "arguments": "{}"},
    ]  # fmt: skip
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    events = await mistral.events(CHAT, body)
    streamed, _ = folded(events)
    assert [call["arguments"] for call in streamed["tool_calls"]] == ['{"city": "a"}', "{}"]
    rows = [row for event in events[:-1] for c in event["choices"] if c["logprobs"] for row in c["logprobs"]["content"]]
    assert rows == choice["logprobs"]["content"]
    typed = mistral_tokenizer().encode("[TOOL", add_special_tokens=False) + mistral_tokenizer().encode(
        "_CALLS]get_time[ARGS]{}", add_special_tokens=False
    )
    assert not set(mistral_tokenizer().convert_tokens_to_ids(["[TOOL_CALLS]"])) & set(typed)


async def test_stop_strings_look_at_the_text_that_clients_see(mistral):
    mistral.script('ab[TOOL_CALLS]get_time[ARGS]{"x": 1} and more')
    body = {"messages": [USER], "tools": TOOLS, "seed": 1, "stop": ['bget_time{"x"']}
    answer = await mistral.post(CHAT, body)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("a", 'bget_time{"x"')


async def test_thoughts_are_split_off(hermes):
    ids = hermes.script("<think>\nWell.\n</think>\n\nYes")
    num = ids.index(hermes_tokenizer().convert_tokens_to_ids("</think>")) + 1
    body = {"messages": [USER], "seed": 1}
    answer = await hermes.post(CHAT, body)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("\nWell.\n",) * 2 + ("\n\nYes",)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
    events = await hermes.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    streamed, _ = folded(events)
    assert (streamed["reasoning"], streamed["content"]) == ("\nWell.\n", "\n\nYes")
    assert events[-2]["usage"] == answer["usage"]
    hidden = await hermes.post(CHAT, {**body, "include_reasoning": False})
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "\n\nYes", "refusal": None}
    hidden, _ = folded(await hermes.events(CHAT, {**body, "include_reasoning": False}))
    assert (hidden["reasoning"], hidden["content"]) == ("", "\n\nYes")


async def test_a_response_has_items(hermes):
    hermes.script("<think>Well.</think>" + TWO)
    body = {"input": "Weather?", "tools": FLAT, "seed": 1}
    answer = await hermes.post(RESPONSES, body)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in answer["output"]] == kinds
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "Well."}]
    assert answer["output"][1]["content"][0]["text"] == "I look."
    assert [json.loads(item["arguments"]) for item in answer["output"][2:]] == ARGUMENTS
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 1
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather", "get_time"]
    hidden = await hermes.post(RESPONSES, {**body, "include_reasoning": False})
    assert [item["type"] for item in hidden["output"]] == kinds[1:]
    events = await hermes.events(RESPONSES, body)
    final = events[-1]["response"]["output"]
    volatile = ("id", "call_id")
    assert [{k: v for k, v in item.items() if k not in volatile} for item in final] == [
        {k: v for k, v in item.items() if k not in volatile} for item in answer["output"]
    ]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2, 3]
    assert [event["item"] for event in done] == final
    for index, item in enumerate(final[2:], start=2):
        deltas = [
            e["delta"]
            for e in events
            if e["type"] == "response.function_call_arguments.delta" and e["output_index"] == index
        ]
        (end,) = [
            e for e in events if e["type"] == "response.function_call_arguments.done" and e["output_index"] == index
        ]
        assert "".join(deltas) == end["arguments"] == item["arguments"]
        assert end["item_id"] == item["id"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_items_of_earlier_answers_are_turns(hermes):
    hermes.script("Yes")
    items = [
        {"type": "message", "role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Well."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "21"}]},
    ]
    answer = await hermes.post(RESPONSES, {"input": items, "tools": FLAT, "seed": 1})
    calls = [
        {"type": "function", "id": "c1", "function": {"name": "get_time", "arguments": {}}},
        {"type": "function", "id": "c2", "function": {"name": "get_weather", "arguments": {"city": "a"}}},
    ]
    rendered = [
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "tool", "tool_call_id": "c2", "content": "21"},
    ]
    expected = hermes_tokenizer().apply_chat_template(
        rendered, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert answer["usage"]["input_tokens"] == len(expected)


async def test_a_message_has_blocks(hermes):
    hermes.script("<think>Well.</think>" + TWO)
    plain = {"model": "toy", "max_tokens": 150, "messages": [USER], "tools": ANTHROPIC}
    body = plain | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = await hermes.post(MESSAGES, body)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0]["thinking"] == "Well."
    assert answer["content"][1]["text"] == "I look."
    assert [block["input"] for block in answer["content"][2:]] == ARGUMENTS
    assert answer["stop_reason"] == "tool_use"
    events = await hermes.events(MESSAGES, body)
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    for index, block in enumerate(answer["content"]):
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == index]
        if block["type"] == "thinking":
            assert deltas.pop() == {"type": "signature_delta", "signature": ANY}
            assert block["signature"]
        text = "".join(next(value for name, value in delta.items() if name != "type") for delta in deltas)
        shown = json.loads(text) if block["type"] == "tool_use" else text
        assert shown == block[{"tool_use": "input"}.get(block["type"], block["type"])]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    without = await hermes.post(MESSAGES, plain)
    assert [block["type"] for block in without["content"]] == ["text", "tool_use", "tool_use"]


async def test_blocks_of_earlier_answers_are_turns(hermes):
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Well.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "21"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    counted = await hermes.post(f"{MESSAGES}/count_tokens", {"model": "toy", "messages": messages, "tools": ANTHROPIC})
    call = {"type": "function", "id": "t1", "function": {"name": "get_weather", "arguments": {"city": "a"}}}
    rendered = [
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Well.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "21"},
        {"role": "user", "content": "And?"},
    ]
    tools = [
        WEATHER,
        {
            "type": "function",
            "function": {"name": "get_time", "description": "", "parameters": TIME["function"]["parameters"]},
        },
    ]
    expected = hermes_tokenizer().apply_chat_template(
        rendered, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert counted == {"input_tokens": len(expected)}


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"tools": [5]}, "tools", "tools[0]"),
        ({"tools": [WEATHER, {"type": "web_search"}]}, "tools", "tools[1]"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools", "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools",
            "[0]",
        ),
        *(
            (
                {"tools": [{"type": "function", "function": {"name": "a", "parameters": part}}]},
                "tools",
                next(iter(part)),
            )
            for part in ({"properties": ["a"]}, {"required": 5}, {"required": [{}]})
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools", "tools[0]"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "always"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "h"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", "tools"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"functions": [{"name": "f"}]}, "functions", "old"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "trust-request-chat-template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        ({"messages": [{**USER, "function_call": {}}]}, "messages", "function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages", "tool_calls"),
    ],
)
async def test_what_is_wrong_with_tools_is_named(hermes, change, param, said):
    error = (await hermes.post(CHAT, {"messages": [USER], **change}, 400))["error"]
    assert error["param"] == param, error
    assert said in error["message"]


async def test_a_model_without_a_known_format_refuses_tools(g):
    error = (await g.post(CHAT, {"messages": [USER], "tools": TOOLS}, 400))["error"]
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    await g.post(CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "none", "max_tokens": 1})


def test_a_tool_that_is_named_is_called_once():
    named = {"type": "function", "function": {"name": "get_time"}}
    assert not chat_tools({"tools": TOOLS, "tool_choice": named}).is_parallel
    assert not response_tools({"tools": FLAT, "tool_choice": {"type": "function", "name": "get_time"}}).is_parallel
    assert not message_tools({"tools": ANTHROPIC, "tool_choice": {"type": "tool", "name": "get_time"}}).is_parallel
    assert chat_tools({"tools": TOOLS, "tool_choice": "required"}).is_parallel


def test_arguments_of_a_message_are_json_or_said_to_be_none():
    """Models write raw line breaks into strings; NaN would make the whole answer no JSON."""
    assert _object('{"text": "a\nb"}') == {"text": "a\nb"}
    assert _object("") == {}
    for wrong in ('{"a": NaN}', '{"a": "b', '{"a": [1}'):
        assert _object(wrong) == {"INVALID_JSON": wrong}
