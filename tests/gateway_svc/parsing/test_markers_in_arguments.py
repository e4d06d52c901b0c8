"""A marker within a string of a call's arguments is text: its token, its spelling, of any format, however it is cut."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_svc.parsing.argument_kinds import TEXT as STRING
from gateway_svc.parsing.output import Message, Reading
from gateway_svc.requests.tools import Tool, ToolUse
from gateway_svc.tools.grammars import grammar_of
from tests.gateway_svc.parsing.test_streamed_parts import (
    FORMATS,
    IDS,
    MARKERS,
    STYLES,
    cut,
    formats,
    tokens_of,
    written,
)
from tests.helpers.models.outputs_in_deltas import Token, deltas, message_of, parse, whole

pytestmark = pytest.mark.slow

QWEN_TAGS = ("<function=f>", "</function>", "<parameter=a>", "\n")
KEYS = ("a", "city", "x_1")
SCRAPS = st.sampled_from(
    [*MARKERS, *QWEN_TAGS, "<|python_start|>", "<|python_end|>", "[CALL_ID]", '"', "\\", "{", "]", "é", "x "]
)
STRINGS = st.lists(SCRAPS, max_size=6).map("".join)
VALUES = st.recursive(
    STRINGS,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(STRINGS, inner, max_size=2)),
    max_leaves=3,
)
ARGUMENTS = st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2)
CALLS = st.lists(st.tuples(st.just("f"), ARGUMENTS), min_size=1, max_size=2)
ALL_FORMATS = (*FORMATS, "qwen3_coder")
KINDS = {"f": dict.fromkeys(KEYS, frozenset(("string", "array", "object")))}
OF_STRINGS = {"f": dict.fromkeys(KEYS, STRING)}


def own_markers(reading: Reading, style: str) -> set[str]:
    """Those of the format that the model has tokens of, or all where markers are text."""
    markers = (*reading.formats.tool_markers, *reading.formats.reasoning_markers)
    return {marker.text for marker in markers if style == "text" or marker.token_id is not None}


def as_written(tools: str, own: set[str], calls: list, draw) -> list[str]:
    """The calls, cut at the format's own markers: such in strings are tokens of their own, or are spelled."""
    if tools == "qwen3_coder":
        texts = []
        for _, arguments in calls:
            values = {key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()}
            tags = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
            is_bare = draw(st.booleans())
            body = f"<function=f>\n{''.join(tags)}</function>\n"
            texts += [body] if is_bare else ["<tool_call>", f"\n{body}", "</tool_call>"]
    else:
        texts = written(tools, calls, draw)
    found = []
    for text in texts:
        if text in IDS or draw(st.booleans()):
            found.append(text)
        else:
            found += filter(None, re.split(f"({'|'.join(map(re.escape, sorted(own)))})", text))
    return [part for each in found for part in ([each] if each in own or each not in IDS else [each[:1], each[1:]])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tools", ALL_FORMATS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_arguments_with_markers_are_what_was_written(tools, data):
    draw = data.draw
    style, skips = draw(st.sampled_from(STYLES)), draw(st.booleans())
    calls = draw(CALLS)
    reading = Reading(formats(tools, style, "qwen3"), ("f",), skips_special=skips, kinds=KINDS)
    tokens = tokens_of(as_written(tools, own_markers(reading, style), calls, draw), style, skips, draw)
    parts = parse(reading, cut(tokens, draw))
    assert parts == parse(reading, [whole(tokens)])
    message = message_of(parts)
    assert [json.loads(call.arguments) for call in message.calls] == [arguments for _, arguments in calls]
    assert message.content is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_strings_with_markers_are_given_on_by_qwen_coder_as_they_come(data):
    """Where the schema says string, pieces of it go out before its end."""
    draw = data.draw
    style, skips = draw(st.sampled_from(STYLES)), draw(st.booleans())
    calls = draw(st.lists(st.tuples(st.just("f"), st.fixed_dictionaries({"a": STRINGS})), min_size=1, max_size=2))
    reading = Reading(formats("qwen3_coder", style, "qwen3"), ("f",), skips_special=skips, kinds=OF_STRINGS)
    tokens = tokens_of(as_written("qwen3_coder", own_markers(reading, style), calls, draw), style, skips, draw)
    parts = parse(reading, cut(tokens, draw))
    assert parts == parse(reading, [whole(tokens)])
    assert [json.loads(call.arguments) for call in message_of(parts).calls] == [arguments for _, arguments in calls]


def read(tools: str, texts: list[str], finish: str = "stop", names: tuple[str, ...] = ("f", "g")) -> Message:
    """The message of an output: at once, and a character at a time."""
    tokens = [token for text in texts for token in ([Token(text, IDS[text])] if text in IDS else map(Token, text))]
    reading = Reading(formats(tools, "added"), names, kinds=OF_STRINGS)
    parts = parse(reading, [whole(tokens, finish)])
    assert parse(reading, deltas(tokens, [1] * len(tokens), [], finish)) == parts
    return message_of(parts)


@pytest.mark.parametrize("end", ["</tool_call>", "<tool_call>"])
def test_a_value_that_is_never_closed_ends_at_the_first_marker(end):
    head = "<function=f>\n<parameter=a>\nv\n"
    message = read("qwen3_coder", ["<tool_call>", head, end, "\nso", "</tool_call>", " on", "<tool_call>", head])
    assert [json.loads(call.arguments) for call in message.calls] == [{"a": "v"}, {"a": "v"}]
    assert (message.content or "").endswith("on")
    (call,) = read("qwen3_coder", ["<tool_call>", head, end, "\nso"], finish="length").calls
    assert call.arguments == json.dumps({"a": f"v\n{end}\nso"})[:-2], "it may go on"


@pytest.mark.parametrize("before", ["", "I look. "])
@pytest.mark.parametrize("behind", [[], ["\n", "</tool_call>"]])
def test_a_function_of_qwen_coder_is_a_call_without_a_marker_too(before, behind):
    body = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    message = read("qwen3_coder", [before, body, *behind, "\n", body, " and"])
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("f", {"a": "1"})] * 2
    assert message.content == f"{before.rstrip()}and", "space beside calls is none of it"


@pytest.mark.parametrize("text", ["<function=NAME>\n</function> is the form", "a <function=f", "<function=x", "<func"])
def test_what_names_no_tool_is_content(text):
    message = read("qwen3_coder", [text])
    assert (message.calls, message.content) == ([], text)
    if "<function=f" not in text:
        assert read("qwen3_coder", [text], finish="length").content == text


def num_taken(tools: str, mode: str, text: str) -> int:
    """How many bytes of an answer the grammar of a request with a strict tool lets through."""
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    use = ToolUse((Tool("f", None, schema, is_strict=True),), mode)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar_of(use, formats(tools, "plain"), None, None))
    assert not matcher.is_error(), matcher.get_error()
    return int(matcher.try_consume_tokens(list(text.encode())))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize(
    ("tools", "answer"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x@y"}}\n</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": "x@y"}}'),
        ("pythonic", '[f(a="x@y")]'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x@y"}}]'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx@y\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_a_forced_call_may_have_markers_too_and_keeps_them(tools, answer, mode, marker):
    text = answer.replace("@", marker)
    assert num_taken(tools, mode, text) == len(text)
    reading = Reading(formats(tools, "plain"), ("f",), kinds=OF_STRINGS)
    (call,) = message_of(parse(reading, [whole([*map(Token, text)])])).calls
    assert json.loads(call.arguments) == {"a": f"x{marker}y"}


def test_a_strict_function_of_qwen_coder_is_not_written_without_its_marker():
    assert num_taken("qwen3_coder", "auto", "I look. <function=f>") == len("I look. <function")
