"""Tool calls and thoughts: what was written is read, however it is cut into tokens and deltas."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.info import AddedToken, ModelInfo
from gateway_svc.parsing.formats import Formats, find_formats
from gateway_svc.parsing.output import OutputParser, Reading, read_output
from gateway_svc.parsing.parts import Content
from gateway_svc.parsing.reasoning import Opening, opening_of_turn
from tests.helpers.models.outputs_in_deltas import Token, deltas, joined, message_of, parse, whole

NAMES = ("get_weather", "f", "a-b")
MARKERS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]",
    "[/THINK]",
)  # fmt: skip
IDS = {text: 100 + index for index, text in enumerate(MARKERS)}
STYLES = ("special", "added", "plain")
FORMATS = ("hermes", "llama3_json", "pythonic", "mistral", "mistral-list")
TEXT = st.text(alphabet="ab {}[]<>/\"\\':;,\n()=_é天", max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "city", "x_1"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def formats(tools: str, style: str, reasoning: str = "none") -> Formats:
    """Of a model whose markers are special tokens, added ones, or plain text."""
    known = MARKERS if tools != "mistral-list" else [text for text in MARKERS if text != "[ARGS]"]
    tokens = [AddedToken(IDS[text], text, style == "special") for text in known]
    info = ModelInfo(
        "m", "a", 512, 256, "float32", [0], None, True, True, 1, True, b"", "", [] if style == "plain" else tokens
    )
    return find_formats(info, tools.partition("-")[0], reasoning)  # type: ignore[arg-type]


def python_literal(value: object) -> str:
    return repr(value)


def written(tools: str, calls: list, draw) -> list[str]:
    """Calls as a model writes them: texts and markers in turn."""
    indent = draw(st.sampled_from([None, 1]))
    texts = [json.dumps(arguments, indent=indent, ensure_ascii=draw(st.booleans())) for _, arguments in calls]
    names = [name for name, _ in calls]
    match tools:
        case "hermes":
            found = []
            for name, text in zip(names, texts, strict=True):
                body = [f'"name": "{name}"', f'"arguments": {text}']
                body = body if draw(st.booleans()) else body[::-1]
                found += ["<tool_call>", "\n{" + ", ".join(body) + "}\n", "</tool_call>", "\n"]
            return found
        case "llama3_json":
            tag = ["<|python_tag|>"] if draw(st.booleans()) else []
            return [*tag, "; ".join(f'{{"name": "{n}", "parameters": {t}}}' for n, t in zip(names, texts, strict=True))]
        case "pythonic":
            written_calls = [
                f"{name}({', '.join(f'{key}={python_literal(value)}' for key, value in arguments.items())})"
                for name, arguments in calls
            ]
            return ["[" + ", ".join(written_calls) + "]"]
        case "mistral":
            return [each for n, t in zip(names, texts, strict=True) for each in ("[TOOL_CALLS]", n, "[ARGS]", t)]
    listed = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in zip(names, texts, strict=True)]
    return ["[TOOL_CALLS]", "[" + ", ".join(listed) + "]"]


def tokens_of(texts: list[str], style: str, skips: bool, draw) -> list[Token]:
    """The tokens: markers are one each, unless they are plain; all other text is cut into sizes that take turns."""
    tokens = []
    sizes = itertools.cycle(draw(st.lists(st.integers(1, 6), min_size=1, max_size=8)))  # one draw for each is dear
    for text in texts:
        if text in IDS and style != "plain":
            tokens.append(Token(text, IDS[text], is_hidden=skips and style == "special"))
            continue
        while text:
            size = next(sizes)
            tokens.append(Token(text[:size]))
            text = text[size:]
    return tokens


def cut(tokens: list[Token], draw, finish="stop"):
    sizes = draw(st.lists(st.integers(0, 4), max_size=len(tokens)))
    lags = draw(st.lists(st.integers(0, 5), max_size=len(tokens)))
    return deltas(tokens, sizes, lags, finish)


@pytest.mark.slow
@pytest.mark.parametrize("tools", FORMATS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_a_model_writes_is_what_is_read(tools, data):
    draw = data.draw
    style, skips = draw(st.sampled_from(STYLES)), draw(st.booleans())
    thought = draw(st.one_of(st.none(), TEXT))
    calls = draw(st.one_of(st.just([]), CALLS))
    content = draw(TEXT)
    if tools in ("llama3_json", "pythonic"):
        content = "" if calls else "x" + content
    texts = [] if thought is None else ["<think>", thought, "</think>"]
    if style != "plain":  # in plain tokens, a marker is text
        content += draw(st.sampled_from(["", *MARKERS])) if content else ""
    texts_of_content = [content[i : i + 1] for i in range(len(content))]
    texts = [*texts, *texts_of_content, *(written(tools, calls, draw) if calls else [])]
    reading = Reading(formats(tools, style, "qwen3"), NAMES, skips_special=skips)
    tokens = tokens_of(texts, style, skips, draw)
    parts = parse(reading, cut(tokens, draw))
    message = message_of(parts)
    assert message.thought == (thought or None)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [
        (name, json.loads(json.dumps(arguments))) for name, arguments in calls
    ]
    expected = content.rstrip() if calls else content
    assert (message.content or "") == (expected if expected.strip() or not calls else "")
    assert parts == parse(reading, [whole(tokens)])


@pytest.mark.slow
@pytest.mark.parametrize("tools", [*FORMATS, "qwen3_coder"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_output_is_read_the_same_however_it_is_cut(tools, data):
    """Also what only looks like a call, and what is cut by its length."""
    draw = data.draw
    style, skips = draw(st.sampled_from(STYLES)), draw(st.booleans())
    scraps = [
        '{"name": "f", ',
        '"arguments": {',
        '"parameters": {"a": 1}',
        "}",
        "]",
        "[f(a=1)",
        ", f(b='x')",
        "; ",
        "f",
        *(["<function=f>", "<parameter=a>", "</parameter>", "</function>", "\n"] if tools == "qwen3_coder" else []),
    ]
    texts = draw(st.lists(st.one_of(st.sampled_from([*MARKERS, *scraps]), TEXT), max_size=9))
    finish = draw(st.sampled_from(["stop", "length"]))
    reasoning = draw(st.sampled_from(["none", "qwen3", "deepseek_r1", "mistral"]))
    opening = draw(st.sampled_from(Opening))
    reading = Reading(formats(tools, style, reasoning), NAMES, skips_special=skips, opening=opening)
    tokens = tokens_of(texts, style, skips, draw)
    at_once = parse(reading, [whole(tokens, finish)])
    assert parse(reading, cut(tokens, draw, finish)) == at_once
    message = message_of(at_once)
    text = "".join(token.shown for token in tokens)
    if not message.calls and finish == "stop" and reasoning == "none":
        assert (message.content or "") == text, "what is no call is given back"
    assert len(message.content or "") + len(message.thought or "") <= len(text)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data(), tools=st.sampled_from(FORMATS))
def test_a_call_that_is_cut_keeps_what_was_parsed(data, tools):
    """What is not known to be a call yet is content: nothing is lost."""
    draw = data.draw
    calls = draw(CALLS)
    texts = written(tools, calls, draw)
    tokens = tokens_of(texts, "added", True, draw)
    num = draw(st.integers(0, len(tokens)))
    reading = Reading(formats(tools, "added"), NAMES)
    message = message_of(parse(reading, cut(tokens[:num], draw, "length")))
    full = message_of(parse(reading, [whole(tokens)]))
    for index, call in enumerate(message.calls):
        assert call.name == full.calls[index].name
        assert full.calls[index].arguments.startswith(call.arguments)
    if message.calls and len(message.calls) == len(calls):
        assert message.content is None, "nothing of a call is content"
    text = "".join(token.shown for token in tokens[:num])
    assert text.endswith((message.content or "").rstrip(), 0, len(text.rstrip()))
    if not message.calls:
        assert (message.content or "").strip() == text.strip()


def test_markers_in_plain_tokens_are_text():
    tokens = [Token("<tool"), Token("_call>"), Token('{"name": "f", "arguments": {}}'), Token("</tool_call>")]
    message = message_of(parse(Reading(formats("hermes", "added"), NAMES), [whole(tokens)]))
    assert (message.content, message.calls) == ("".join(token.text for token in tokens), [])


def test_one_call_where_others_are_not_wanted():
    texts = [*(("[TOOL_CALLS]", "f", "[ARGS]", "{}") * 3)]
    tokens = [Token(text, IDS.get(text, 7), text in IDS) for text in texts]
    reading = Reading(formats("mistral", "special"), NAMES, is_parallel=False)
    assert len(message_of(parse(reading, [whole(tokens)])).calls) == 1


@pytest.mark.parametrize(
    ("prompt", "output", "thought", "content"),
    [
        ([5, 102], "a</think>b", "a", "b"),
        ([5, 102, 10], "a</think>b", "a", "b"),
        ([102, 10, 103, 10], "ab", None, "ab"),
        ([102, 5, 5, 5], "ab", None, "ab"),
        ([5], "\n<think>a</think>b", "a", "b"),
        ([5], "b<think>a</think>", None, "b<think>a</think>"),
        ([5, 102], "a", "a", None),
    ],
)
def test_the_prompt_says_whether_a_thought_is_open(prompt, output, thought, content):
    tokens = [Token(text, IDS.get(text, 7)) for text in re.split("(</?think>)", output) if text]
    reading = Reading(formats("hermes", "added", "qwen3"))
    message = read_output(reading, whole(tokens), prompt)
    assert (message.thought, message.content) == (thought, content)
    if thought is not None:
        end = next((index + 1 for index, token in enumerate(tokens) if token.text == "</think>"), len(tokens))
        assert message.num_reasoning_tokens == end


@pytest.mark.slow
@pytest.mark.parametrize("tools", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_content_knows_the_tokens_that_made_it(tools, data):
    """And no token of a thought, a call or a marker."""
    draw = data.draw
    style, skips = draw(st.sampled_from(STYLES)), draw(st.booleans())
    calls = draw(st.one_of(st.just([]), CALLS))
    content = draw(TEXT)
    if tools in ("llama3_json", "pythonic"):
        content = "" if calls else "x" + content
    before = tokens_of(["<think>", draw(TEXT), "</think>"], style, skips, draw)
    middle = tokens_of([content], style, skips, draw)
    behind = tokens_of(written(tools, calls, draw) if calls else [], style, skips, draw)
    tokens = [*before, *middle, *behind]
    reading = Reading(formats(tools, style, "qwen3"), NAMES, skips_special=skips)
    for outputs in ([whole(tokens)], cut(tokens, draw)):
        parser = OutputParser(reading, [], with_tokens=True)
        parts = [part for output in outputs for part in parser.feed(output)]
        assert joined(parts) == parse(reading, outputs)
        found = [token for part in parts if isinstance(part, Content) for token in part.tokens]
        shown = content.rstrip() if calls else content
        num, num_chars = 0, 0
        while num < len(middle) and num_chars < len(shown):
            num_chars += len(middle[num].text)
            num += 1
        assert found == list(range(len(before), len(before) + (num if shown.strip() or not calls else 0)))


def test_tokens_behind_the_text_are_known():
    tokens = [Token("a"), Token("", 9), Token("</tool_call>", IDS["</tool_call>"], is_hidden=True), Token("", 2)]
    parser = OutputParser(Reading(formats("hermes", "special"), NAMES), [], with_tokens=True)
    assert [part.tokens for part in parser.feed(whole(tokens))] == [(0,)]
    assert parser.tokens_behind() == (3,)


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("style", ["added", "plain"])
@pytest.mark.parametrize(
    ("turn", "output", "thought", "content"),
    [
        ("<think>a", "b</think>c", "b", "c"),
        ("\n<think>\n", "b", "b", None),
        ("<think>a</think>b", "c", None, "c"),
        ("a</think>", "b<think>", None, "b<think>"),
        ("It is", " so</think>", None, " so</think>"),
        ("It is", "<think>a</think>b", None, "<think>a</think>b"),
    ],
)
def test_a_continued_answer_is_read_from_where_it_is(reasoning, style, turn, output, thought, content):
    opening = opening_of_turn(turn, "<think>", "</think>")
    assert opening is not None
    tokens = tokens_of([text for text in re.split("(</?think>)", output) if text], style, False, lambda _: [1])
    reading = Reading(formats("hermes", style, reasoning), opening=opening)
    message = read_output(reading, whole(tokens), [])
    assert (message.thought, message.content) == (thought, content)


def test_a_continued_answer_without_text_says_nothing():
    assert opening_of_turn(" \n", "<think>", "</think>") is None
