"""Conversations in OpenAI's form: messages with calls, and the arguments of a template."""

from __future__ import annotations

import json

import pytest

from cadenza.calls.convert import prompt_to_proto
from cadenza.chats import ChatMessage, ToolCall, chat_options, parse_messages
from cadenza.prompts import parse_chat, parse_chats

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
USER = {"role": "user", "content": "Hi"}


def test_every_field_of_a_message():
    assert parse_messages(
        [
            USER | {"name": "Ann", "refusal": None, "annotations": [], "audio": None},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm"},
            {"role": "tool", "content": [{"type": "text", "text": "1"}, "2"], "tool_call_id": "c1"},
            {"role": "assistant", "reasoning": "Hm"},
            {"role": "assistant", "reasoning": "Hm", "reasoning_content": "Hm", "content": "Yes"},
            {"role": "assistant", "content": "", "tool_calls": None},
            ChatMessage("user", "x"),
        ]
    ) == [
        ChatMessage("user", "Hi", name="Ann"),
        ChatMessage("assistant", None, (ToolCall("f", '{"a": "é"}', "c1"),), reasoning_content="Hm"),
        ChatMessage("tool", "12", tool_call_id="c1"),
        ChatMessage("assistant", reasoning_content="Hm"),
        ChatMessage("assistant", "Yes", reasoning_content="Hm"),
        ChatMessage("assistant", ""),
        ChatMessage("user", "x"),
    ]


def test_arguments_as_text_or_as_an_object():
    def arguments(value):
        function = {"name": "f"} if value is ... else {"name": "f", "arguments": value}
        (message,) = parse_messages([{"role": "assistant", "tool_calls": [{"function": function}]}])
        return message.tool_calls[0].arguments

    assert arguments('{"b":1, "a":2}') == '{"b":1, "a":2}'
    assert arguments({"b": 1, "a": "é"}) == '{"b": 1, "a": "é"}'
    assert arguments({}) == "{}"
    assert arguments("no JSON") == "no JSON", "the server says what is wrong with it"
    for nothing in (..., None, ""):
        assert arguments(nothing) == ""


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "assistant", "content": "a", "function_call": {}}, "message 0 cannot have function_call"),
        ({"role": "user", "contents": "a", "content": ""}, "message 0 cannot have contents"),
        ({"role": "assistant", "tool_calls": "f"}, "message 0: tool_calls must be a list, not str 'f'"),
        ({"role": "assistant", "tool_calls": [3]}, r"message 0: tool_calls\[0\] must be \{"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}, "must be {"),
        ({"role": "assistant", "tool_calls": [CALL, {"function": {}}]}, r"tool_calls\[1\].function has no name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}, r"function.name must be a str, not int 3"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            r"function.arguments must be a str or an object, not list \[1\]",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}]},
            "function.arguments cannot be written as JSON: Object of type set",
        ),
        ({"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "f"}}]}, r"\.id must be a str"),
        ({"role": "assistant", "tool_calls": []}, "message 0: content is missing"),
        ({"role": "user", "content": "a", "name": 3}, "message 0: name must be a str"),
        ({"role": "tool", "content": "a", "tool_call_id": 3}, "message 0: tool_call_id must be a str"),
        ({"role": "assistant", "reasoning_content": 3}, "message 0: reasoning_content must be a str"),
        ({"role": "assistant", "reasoning_content": "\ud800"}, "message 0: reasoning_content holds a lone surrogate"),
    ],
)
def test_what_is_no_message(message, error):
    with pytest.raises(ValueError, match=error):
        parse_messages([message])


def test_the_arguments_of_a_template_on_the_wire():
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    options = chat_options(
        tools=tools, documents=[{"b": 1, "a": 2}], chat_template_kwargs={"x": None}, chat_template="{{ x }}"
    )
    message = prompt_to_proto(parse_chat([USER], options)).chat
    assert [json.loads(each) for each in message.tools] == tools
    assert list(message.documents) == ['{"b": 1, "a": 2}']
    assert (message.template_kwargs, message.template) == ('{"x": null}', "{{ x }}")
    assert (message.add_generation_prompt, message.continue_final_message) == (True, False)
    plain = prompt_to_proto(parse_chat([USER], chat_options(tools=[], documents=None, chat_template_kwargs={})))
    assert plain == prompt_to_proto(parse_chat([USER], chat_options()))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tools": {"type": "function"}}, "tools must be a list of objects, not dict"),
        ({"tools": [{}, "f"]}, r"tools\[1\] must be an object, not str 'f'"),
        ({"documents": ["text"]}, r"documents\[0\] must be an object"),
        ({"documents": [{"a": float("nan")}]}, r"documents\[0\] cannot be written as JSON"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs holds a lone surrogate"),
        ({"chat_template": b"x"}, "chat_template must be a str, the template itself, not bytes"),
        ({"chat_template": "\ud800"}, "chat_template holds a lone surrogate"),
    ],
)
def test_what_are_no_options(options, error):
    with pytest.raises(ValueError, match=error):
        chat_options(**options)


def test_messages_as_objects_in_many_conversations():
    chat = [ChatMessage("user", "x")]
    assert [each.messages for each in parse_chats([chat, chat])] == [chat, chat]
    assert parse_chats(chat)[0].messages == chat
    with pytest.raises(ValueError, match="conversation 1: message 0 cannot have a"):
        parse_chats([chat, [USER | {"a": 1}]])


def test_a_refusal_in_parts_is_its_text():
    parts = [{"type": "text", "text": "No"}, {"type": "refusal", "refusal": ", sorry"}]
    (message,) = parse_messages([{"role": "assistant", "content": parts}])
    assert message.content == "No, sorry"
    for bad in ({"type": "refusal"}, {"type": "refusal", "refusal": 5}, {"type": ["refusal"]}, {"refusal": "No"}):
        with pytest.raises(ValueError, match="only text parts are supported"):
            parse_messages([{"role": "assistant", "content": [bad]}])
