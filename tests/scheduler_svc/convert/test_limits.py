"""The lengths that requests may have: the table, the protos that state it, and what it leaves out."""

from __future__ import annotations

import re

import pytest

from cadenza.v1 import admin_pb2, types_pb2
from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.convert.limits import LIMITS, MAX_PROMPT_CHARS, MAX_PROMPT_TOKENS, check_limits
from scheduler_svc.core.errors import RequestRejectedError
from tests.helpers.paths import ROOT

PROTOS = ROOT / "protos" / "cadenza" / "v1"
SUMMED = {"PromptPart.text", "TokenIds.ids", "ChatMessage.content", "ChatMessage.reasoning_content"}
"""Limited over the whole prompt."""
LOOKED_UP = {"SessionRequest.tenant_token_sha256"}
"""Found among the hashes of tokens, which have 32 bytes, or refused."""


def comment_of(name):
    """The comment over a field in the protos, as one line."""
    message, field = name.split(".")
    for path in PROTOS.glob("*.proto"):
        body = re.search(rf"^message {message} {{\n(.*?)^}}", path.read_text(), re.DOTALL | re.MULTILINE)
        if body is not None:
            found = re.search(rf"((?:^ *//[^\n]*\n)+)^ *[\w<>, ]+ {field} = ", body[1], re.MULTILINE)
            return " ".join(re.sub(r"^ *// ?", "", found[1], flags=re.MULTILINE).split())
    raise AssertionError(f"there is no {name}")


@pytest.mark.parametrize("name", LIMITS)
def test_the_comment_states_the_limit(name):
    limit, comment = LIMITS[name], comment_of(name)
    for number in filter(None, (limit.length, limit.items, limit.total)):
        assert re.search(rf"(?<![\d,]){number:,}(?!,?\d)", comment), comment
    assert ("no control characters" in comment) == limit.is_id


def test_the_comment_states_the_limits_of_a_whole_prompt():
    text = " ".join((PROTOS / "types.proto").read_text().replace("//", " ").split())
    assert f"at most {MAX_PROMPT_CHARS:,} characters of text and {MAX_PROMPT_TOKENS:,} token ids" in text


def lengthy_fields(descriptor):
    """Every field that could be long, down from a request."""
    for field in descriptor.fields:
        name = f"{descriptor.name}.{field.name}"
        if name in LOOKED_UP:
            continue
        if field.is_repeated or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            yield name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from lengthy_fields(field.message_type)


def test_nothing_is_without_a_limit():
    requests = [
        message.DESCRIPTOR
        for message in (
            pb.GenerateRequest, pb.SessionRequest, pb.AbortRequest, pb.TokenizeRequest, pb.DetokenizeRequest,
            admin_pb2.WatchStepsRequest, admin_pb2.GetBlockTableRequest, admin_pb2.DrainRequest,
            admin_pb2.LoadAdapterRequest, admin_pb2.UnloadAdapterRequest, admin_pb2.ListAdaptersRequest,
        )
    ]  # fmt: skip
    found = {name for request in requests for name in lengthy_fields(request)}
    assert found == set(LIMITS) | SUMMED


def refused(message):
    with pytest.raises(RequestRejectedError) as caught:
        check_limits(message)
    return caught.value.field


def test_paths_name_the_item():
    assert refused(pb.GenerateRequest(sampling_params={"stop": ["a", "x" * 1025]})) == "sampling_params.stop[1]"
    turns = [types_pb2.ChatMessage(role="user"), types_pb2.ChatMessage(role="r" * 65)]
    assert refused(pb.TokenizeRequest(prompt=[{"chat": {"messages": turns}}])) == "prompt[0].chat.messages[1].role"
    halves = [{"text": "x" * (MAX_PROMPT_CHARS // 2)}, {"text": "x" * 9_000_000}]
    assert refused(pb.GenerateRequest(prompt=halves)) == "prompt[1]"


def test_a_long_list_is_not_looked_into():
    """Its items are as many as a message can hold."""
    parts = [{"tokens": {"ids": [1]}}] * 2000
    assert refused(pb.GenerateRequest(prompt=[{"chat": {"messages": [{"role": "r" * 65}]}}, *parts])) == "prompt"


def test_ids_may_be_any_text_but_control_characters():
    check_limits(pb.AbortRequest(request_id="名前 é 👍🏽 / .. '\""))
    for character in "\x00\t\n\x1b\x7f\x85\x9f":
        assert refused(pb.AbortRequest(request_id="a" + character)) == "request_id"


def chat(*messages, **fields):
    return pb.GenerateRequest(prompt=[{"chat": {"messages": messages, **fields}}])


def test_the_texts_of_a_chat_are_added_up():
    third = "x" * (MAX_PROMPT_CHARS // 3)
    pieces = [third[index : index + 200_000] for index in (0, 200_000)]
    calls = [{"name": "f", "arguments": piece} for piece in pieces]
    message = {"role": "assistant", "content": third, "reasoning_content": third, "tool_calls": calls}
    check_limits(chat(message))
    assert refused(chat(message, {"role": "user", "content": "xx"})) == "prompt[0]"


def test_the_texts_of_a_list_are_added_up():
    for name in ("tools", "documents"):
        check_limits(chat(**{name: ["x" * 524_288] * 2}))
        assert refused(chat(**{name: ["x" * 524_288] * 2 + ["x"]})) == f"prompt[0].chat.{name}"


def test_calls_of_all_messages_are_counted():
    message = {"role": "assistant", "tool_calls": [{"name": "f"}] * 256}
    check_limits(chat(message, message))
    more = [{"name": "n" * 257}]
    assert refused(chat(message, message, {"tool_calls": more})) == "prompt[0].chat.messages[2].tool_calls"
    assert refused(chat(message, {"tool_calls": more})) == "prompt[0].chat.messages[1].tool_calls[0].name"


def test_a_chat_is_alone():
    prompt = [{"text": "a"}, {"chat": {"messages": [{"role": "r" * 65}]}}]
    assert refused(pb.GenerateRequest(prompt=prompt)) == "prompt[1].chat"
    assert refused(pb.TokenizeRequest(prompt=prompt)) == "prompt[1].chat"
