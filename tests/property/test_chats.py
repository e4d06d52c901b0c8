"""Whatever a client says in a chat reaches the template: drawn messages in OpenAI's form, over the wire."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
from google.protobuf.message import DecodeError
from hypothesis import given

from cadenza.v1 import types_pb2
from scheduler_svc.convert.request_parts import chat_fields
from scheduler_svc.requests.chats.variables import template_variables
from tests.helpers.models.chats import chat_of, with_text_arguments

texts = st.text(max_size=12)
names = st.text(min_size=1, max_size=8)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


calls = st.builds(
    lambda name, arguments, more: {"type": "function", "function": {"name": name, "arguments": arguments}} | more,
    names,
    objects,
    optional(id=names),
)
messages = st.builds(
    lambda role, said, more: {"role": role} | said | more,
    names,
    st.fixed_dictionaries({"content": texts})
    | st.fixed_dictionaries({"tool_calls": st.lists(calls, min_size=1, max_size=3)}, optional={"content": texts})
    | st.fixed_dictionaries({"reasoning_content": texts}, optional={"content": texts}),
    optional(name=names, tool_call_id=names),
)
chats = st.lists(messages, min_size=1, max_size=4)
RESERVED = "messages tools documents add_generation_prompt continue_final_message template template_kwargs".split()
options = optional(
    tools=st.lists(objects, max_size=3),
    documents=st.lists(objects, max_size=3),
    chat_template_kwargs=objects.filter(lambda given: not {*given} & {*RESERVED, "chat_template"}),
    add_generation_prompt=st.booleans(),
)


@given(chats, options)
def test_what_is_said_is_what_the_template_sees(chat: list[dict[str, Any]], given_options: dict[str, Any]) -> None:
    for form in (chat, with_text_arguments(chat)):
        fields = chat_of(form, **given_options)
        seen = template_variables(fields, {"bos_token": "<s>"})
        for message in seen["messages"]:
            assert message.pop("thinking", None) == message.get("reasoning_content")
        assert seen == {
            "bos_token": "<s>",
            **given_options.get("chat_template_kwargs", {}),
            # Templates read a content of each message but of calls.
            "messages": [each if "tool_calls" in each else {"content": ""} | each for each in chat],
            "tools": given_options.get("tools") or None,
            "documents": given_options.get("documents") or None,
            "add_generation_prompt": given_options.get("add_generation_prompt", True),
        }
        # Keys stay in order: a template writes objects as they come.
        assert json.dumps(seen["tools"]) == json.dumps(given_options.get("tools") or None)


@given(st.binary(max_size=300))
def test_any_bytes_that_are_a_chat_can_be_read(raw: bytes) -> None:
    message = types_pb2.Chat()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        return
    assert chat_fields(message).num_chars >= 0
