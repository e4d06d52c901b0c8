"""Each description of a format keeps to one rule: what it writes is what is read, whole and in any split."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.info import AddedToken, ModelInfo
from cadenza_common.call_formats.catalog import BY_NAME, FORMATS
from cadenza_common.call_formats.names import ReasoningFormat, ToolFormat
from cadenza_common.call_formats.syntax import Body, CallSyntax
from cadenza_common.call_formats.thoughts import THOUGHTS, THOUGHTS_BY_NAME
from cadenza_common.call_formats.writing import written_calls, written_thought
from cadenza_common.grammar.schema_kinds import kind_of_value
from gateway_svc.parsing.formats import Formats, find_formats
from gateway_svc.parsing.output import Reading
from gateway_svc.parsing.reasoning import Opening
from tests.helpers.models.outputs_in_deltas import Token, deltas, message_of, parse, whole

NAMES = ("get_weather", "f", "a-b")
WAYS = [(each.name, index) for each in FORMATS for index in range(len(each.ways))]
ALL_MARKERS = sorted(
    {text for each in FORMATS for text in each.markers}
    | {text for each in THOUGHTS for text in (each.open, each.close, *each.wrappers, *each.parts)}
)
TAGS = ["</parameter>", "<parameter=a>", "</function>", "</arg_value>", "]]>", '"', "\\", "}", "]", "天", "\n", " x "]
STRINGS = st.lists(st.sampled_from([*ALL_MARKERS, *TAGS, "ab", "é\U0001f600"]), max_size=4).map("".join)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.just(1.5), STRINGS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["k", "b c"]), inner, max_size=2)
    ),
    max_leaves=3,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "city", "x_1"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=5)
WORDS = st.sampled_from(["", "Well, I look. ", "天 <b> { [ ", "\nline\n"])


def formats(tools: str, reasoning: str, style: str) -> Formats:
    """A model's formats, whose markers are special tokens, added ones or text."""
    atoms = [*BY_NAME[tools].markers]
    if reasoning != "none":
        thought = THOUGHTS_BY_NAME[reasoning]
        atoms += thought.parts or (thought.open, thought.close, *thought.wrappers)
    added = [AddedToken(100 + index, text, style == "special") for index, text in enumerate(dict.fromkeys(atoms))]
    info = ModelInfo("m", "a", 512, 256, "f", [0], None, True, True, 1, True, b"", "", [] if style == "text" else added)
    return find_formats(info, tools, reasoning)  # type: ignore[arg-type]


def tokens_of(texts: list[tuple[str, bool]], found: Formats, style: str, sizes: list[int]) -> list[Token]:
    """Tokens of texts, of which some have markers; those of other texts are spelled."""
    ids = {marker.text: marker.token_id for marker in found.markers if marker.token_id is not None}
    pattern = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)")
    tokens: list[Token] = []
    for text, has_markers in texts:
        at = 0
        for mark in [*pattern.finditer(text)] if has_markers else []:
            tokens += spelled(text[at : mark.start()], sizes)
            tokens.append(Token(mark.group(), ids[mark.group()], is_hidden=style == "special"))
            at = mark.end()
        tokens += spelled(text[at:], sizes)
    return tokens


def spelled(text: str, sizes: list[int]) -> list[Token]:
    found = []
    while text:
        size = sizes[len(found) % len(sizes)]
        found.append(Token(text[:size]))
        text = text[size:]
    return found


def kinds_of_calls(calls: Any) -> dict[str, dict[str, frozenset[str]]]:
    """What a schema says of these arguments."""
    kinds: dict[str, dict[str, frozenset[str]]] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            of = kinds.setdefault(name, {})
            of[key] = of.get(key, frozenset()) | {kind_of_value(value)}
    return kinds


def can_be_read(way: CallSyntax, calls: Any) -> bool:
    """Whether calls can be told in this way: bare text has no two types for one argument, nor its own end."""
    if way.body is Body.TREE:  # what is in others needs a schema, and these texts have none
        return all(isinstance(value, str) for _, arguments in calls for value in arguments.values())
    if way.body is Body.TAGS:
        return all(len(kinds) == 1 for of in kinds_of_calls(calls).values() for kinds in of.values())
    return True


def test_names_of_options_are_those_of_the_tables():
    assert {each.name for each in FORMATS} == set(get_args(ToolFormat))
    assert {each.name for each in THOUGHTS} == set(get_args(ReasoningFormat))


@pytest.mark.slow
@pytest.mark.parametrize(("tools", "index"), WAYS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_a_format_writes_is_what_is_read(tools, index, data):
    draw = data.draw
    style = draw(st.sampled_from(["special", "added", "text"]))
    way = BY_NAME[tools].ways[index]
    calls = draw(CALLS.filter(lambda calls: can_be_read(way, calls)))
    found = formats(tools, "none", style)
    try:
        text = written_calls(way, calls)
    except ValueError:
        return
    is_first = way.bare is not None and not way.section[0] and not way.call[0]
    before, behind = ("" if is_first else draw(WORDS)), draw(st.sampled_from(["", "\nSo."]))
    tokens = tokens_of([(before, False), (text, True), (behind, False)], found, style, draw(st.just([3, 1, 7])))
    reading = Reading(found, NAMES, skips_special=style == "special", kinds=kinds_of_calls(calls))
    parts = parse(reading, [whole(tokens)])
    sizes, lags = draw(st.lists(st.integers(0, 4), max_size=30)), draw(st.lists(st.integers(0, 5), max_size=30))
    assert parse(reading, deltas(tokens, sizes, lags)) == parts
    message = message_of(parts)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls, text
    assert "".join((message.content or "").split()) == "".join((before + behind).split()), "space beside calls is none"


@pytest.mark.slow
@pytest.mark.parametrize(("tools", "index"), WAYS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_broken_and_cut_outputs_lose_nothing(tools, index, data):
    """What is no call is content, to the last character; streamed is whole, and nothing raises."""
    draw = data.draw
    style = draw(st.sampled_from(["added", "text"]))
    way = BY_NAME[tools].ways[index]
    calls = [("f", {"a": "x y", "b": {"k": [1]}}), ("get_weather", {})]
    text = written_calls(way, calls)
    start, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    text = draw(
        st.sampled_from([text[:start], text[:start] + text[end:], text[start:], text[:start] + "<?" + text[end:]])
    )
    found = formats(tools, "none", style)
    tokens = tokens_of([("Hi ", False), (text, True)], found, style, [2, 5])
    finish = draw(st.sampled_from(["stop", "length"]))
    names = draw(st.sampled_from([NAMES, ("other",)]))
    reading = Reading(found, names, skips_special=False)
    parts = parse(reading, [whole(tokens, finish)])
    sizes = draw(st.lists(st.integers(0, 4), max_size=20))
    assert parse(reading, deltas(tokens, sizes, [], finish)) == parts
    message = message_of(parts)
    if not message.calls and not BY_NAME[tools].wrappers:
        assert message.content == "Hi " + text


@pytest.mark.parametrize(("tools", "index"), WAYS)
@pytest.mark.parametrize("style", ["added", "text"])
def test_what_closes_a_call_and_was_cut_is_no_content(tools, index, style):
    way = BY_NAME[tools].ways[index]
    text = written_calls(way, [("f", {"a": "x"})])
    found = formats(tools, "none", style)
    tokens = tokens_of([(text, True)], found, style, [1])
    reading = Reading(found, NAMES, kinds={"f": {"a": frozenset({"string"})}})
    for num in range(len(tokens), 0, -2):
        parts = parse(reading, [whole(tokens[:num], "length")])
        message = message_of(parts)
        if not message.calls:
            break
        assert message.content is None, tokens[num - 1].text
        if num % 8 == 0:
            assert parse(reading, deltas(tokens[:num], [1] * num, [], "length")) == parts


@pytest.mark.parametrize(("tools", "index"), WAYS)
def test_an_answer_that_must_be_calls_has_no_content_wherever_it_is_cut(tools, index):
    way = BY_NAME[tools].ways[index]
    text = written_calls(way, [("f", {"a": "x"})] * 2)
    for style, first in (("added", 1), ("text", 3)):
        found = formats(tools, "none", style)
        tokens = tokens_of([(text, True)], found, style, [1])
        reading = Reading(found, NAMES, kinds={"f": {"a": frozenset({"string"})}}, has_calls_alone=True)
        for num in range(first, len(tokens), 5):
            message = message_of(parse(reading, [whole(tokens[:num], "length")]))
            assert message.content is None, (len(message.calls), "".join(token.text for token in tokens[:num]))


def test_what_only_resembles_the_end_of_a_call_is_content():
    found, call = formats("hermes", "none", "text"), '<tool_call>\n{"name": "f", "arguments": {}}'
    for behind, finish in (("\n</tool_c", "stop"), ("\n</tool-", "length"), ("\n<b", "length")):
        message = message_of(parse(Reading(found, NAMES), [whole([*map(Token, call + behind)], finish)]))
        assert (len(message.calls), message.content) == (1, behind)


@pytest.mark.slow
@pytest.mark.parametrize("reasoning", [each.name for each in THOUGHTS])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_thoughts_are_split_off(reasoning, data):
    draw = data.draw
    style = draw(st.sampled_from(["special", "added", "text"]))
    syntax = THOUGHTS_BY_NAME[reasoning]
    thought = draw(st.sampled_from(["Well.", "\nI think <b> so\n", "a {天}"]))
    answer = draw(st.sampled_from(["", "It is 5.", " yes <r> "]))
    is_open = draw(st.booleans())
    found = formats("hermes", reasoning, style)
    text = written_thought(syntax, thought)
    text = text[len(syntax.open) :] if is_open else text
    framed = syntax.content[0] + syntax.answer[0] + answer + syntax.answer[1] + syntax.content[1]
    tokens = tokens_of([(text, True), (framed, True)], found, style, [3, 1])
    opening = Opening.OPEN if is_open else Opening.MAYBE
    reading = Reading(found, skips_special=style == "special", opening=opening)
    parts = parse(reading, [whole(tokens)])
    assert parse(reading, deltas(tokens, draw(st.lists(st.integers(0, 4), max_size=20)), [])) == parts
    message = message_of(parts)
    assert (message.thought, (message.content or "").strip()) == (thought, answer.strip())


def test_texts_around_content_are_none_of_it_without_tools_too():
    found = formats("functionary_v32", "none", "text")
    for text, content in (("all\nHi", "Hi"), ("alley", "alley"), ("a>>>all\nb", "ab"), ('f\n{"a": 1}', 'f\n{"a": 1}')):
        tokens = [*map(Token, text)]
        message = message_of(parse(Reading(found), deltas(tokens, [1] * len(tokens), [])))
        assert (message.content, message.calls) == (content, [])
        assert message_of(parse(Reading(found), [whole(tokens)])) == message
