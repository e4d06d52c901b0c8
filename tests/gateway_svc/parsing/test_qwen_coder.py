"""Calls whose arguments are bare text: the schema says what they are, and strings come as they are written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza_common.grammar.schema_kinds import kinds_of
from gateway_svc.parsing.output import Message, Reading
from gateway_svc.parsing.parts import CallArguments
from tests.gateway_svc.parsing.test_streamed_parts import IDS, TEXT, cut, formats, tokens_of
from tests.helpers.models.outputs_in_deltas import Token, deltas, message_of, parse, whole

SCHEMAS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "size": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "flag": {"$ref": "#/$defs/flag"},
    "items": {"type": "array"},
    "more": {"type": ["object", "null"]},
    "maybe": {"type": ["string", "null"]},
    "either": {"enum": ["a", 1]},
}
ROOT = {"$defs": {"flag": {"type": "boolean"}}}
KINDS = {"f": {name: kinds_of(schema, ROOT) for name, schema in SCHEMAS.items()}}
INNER = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), TEXT, st.just("</parameter>\n</function>"))
VALUES = {
    "text": TEXT,
    "count": st.integers(),
    "size": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.integers()),
    "flag": st.booleans(),
    "items": st.lists(INNER, max_size=3),
    "more": st.one_of(st.none(), st.dictionaries(TEXT, INNER, max_size=2)),
    "maybe": st.one_of(st.none(), TEXT.filter(lambda text: text.strip() != "null")),
    "either": st.sampled_from(["a", 1]),
}
ARGUMENTS = st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)


def reading(style: str = "added") -> Reading:
    return Reading(formats("qwen3_coder", style), ("f",), kinds=KINDS)


def written(arguments: dict, write) -> str:
    values = {name: value if isinstance(value, str) else write(value) for name, value in arguments.items()}
    tags = [f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items()]
    return f"\n<function=f>\n{''.join(tags)}</function>\n"


def read(*texts: str, finish: str = "stop") -> Message:
    """The message of an output: at once, and a character at a time."""
    tokens = [token for text in texts for token in ([Token(text, IDS[text])] if text in IDS else map(Token, text))]
    parts = parse(reading(), [whole(tokens, finish)])
    assert parse(reading(), deltas(tokens, [1] * len(tokens), [], finish)) == parts
    return message_of(parts)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read(data):
    draw = data.draw
    calls = draw(st.lists(ARGUMENTS, min_size=1, max_size=2))
    style, write = draw(st.sampled_from(["added", "special", "plain"])), draw(st.sampled_from([json.dumps, repr]))
    texts = ["I look. "]
    for arguments in calls:
        texts += ["<tool_call>", written(arguments, write), "</tool_call>", "\n"]
    tokens = tokens_of(texts, style, True, draw)
    parts = parse(reading(style), cut(tokens, draw))
    message = message_of(parts)
    assert message.content == "I look."
    assert [json.loads(call.arguments) for call in message.calls] == calls
    assert parts == parse(reading(style), [whole(tokens)])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("text", "\n\nline\n\n", "\n\nline\n\n"),
        ("text", 'if a < b: </p> "x" \\n', 'if a < b: </p> "x" \\n'),
        ("other", "5", "5"),
        ("count", " 5 ", 5),
        ("count", "five", "five"),
        ("count", "5.5", "5.5"),
        ("count", "5) or (6", "5) or (6"),
        ("count", "5, b=6", "5, b=6"),
        ("size", "1e3", 1000.0),
        ("size", "null", None),
        ("flag", "True", True),
        ("flag", "false", False),
        ("items", "[1, 'a</parameter>', None]", [1, "a</parameter>", None]),
        ("items", "not [a list", "not [a list"),
        ("more", '{"a": {"b": [true]}}', {"a": {"b": [True]}}),
        ("more", "[1]", "[1]"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "5", "5"),
        ("either", "1", 1),
        ("either", "b", "b"),
    ],
)
def test_a_value_is_what_the_schema_says_or_a_string(name, text, expected):
    message = read("<tool_call>", f"<function=f><parameter={name}>\n{text}\n</parameter></function>", "</tool_call>")
    assert json.loads(message.calls[0].arguments) == {name: expected}
    assert message.content is None


def test_a_string_is_given_on_as_it_comes():
    tokens = [Token("<tool_call>", IDS["<tool_call>"]), *map(Token, "<function=f>\n<parameter=text>\nab\nc")]
    parts = parse(reading(), deltas(tokens, [1] * len(tokens), [], "length"))
    assert [part.text for part in parts if isinstance(part, CallArguments)] == ['{"text": "ab\\nc']


@pytest.mark.parametrize(
    "body",
    ["hello", '{"name": "f", "arguments": {}}', "<function=>", "<function=f", f"<function={'f' * 300}>", "<func>", ""],
)
def test_what_is_no_call_is_given_back_whole(body):
    message = read("Well ", "<tool_call>", body, "</tool_call>", " so")
    assert (message.calls, message.content) == ([], f"Well <tool_call>{body}</tool_call> so")


def test_a_call_that_is_not_closed_is_completed_at_its_end():
    for texts in (
        ("<tool_call>", "\n<function=f>\n<parameter=text>\na\n</parameter>\n"),
        ("<tool_call>", "<function=f><parameter=text>a", "</tool_call>", "\n"),
        ("<tool_call>", "<function=f>junk<parameter=text>a</parameter>junk"),
    ):
        message = read(*texts)
        assert [call.arguments for call in message.calls] == ['{"text": "a"}']
        assert message.content is None
    (call,) = read("<tool_call>", "<function=f>\n<parameter=count>\n5", finish="length").calls
    assert call.arguments == '{"count": '


def test_text_behind_a_call_is_content():
    message = read("<tool_call>", "<function=f>\n</function>\n and", "</tool_call>", "\nmore", "</tool_call>")
    assert [call.arguments for call in message.calls] == ["{}"]
    assert message.content == "and\nmore</tool_call>"


def test_text_between_arguments_is_nothing():
    between = "<<</func<parameter</functio"
    message = read("<tool_call>", f"<function=f>{between}<parameter=count>5</parameter>{between}</function>")
    assert [call.arguments for call in message.calls] == ['{"count": 5}']
