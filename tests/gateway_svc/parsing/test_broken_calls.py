"""What is nearly a call: it is given back whole, or it is a call of which no marker is content."""

from __future__ import annotations

import json
import time

import pytest

from gateway_svc.parsing.output import Message, Reading
from tests.gateway_svc.parsing.test_streamed_parts import IDS, NAMES, formats
from tests.helpers.models.outputs_in_deltas import Token, deltas, message_of, parse, whole

OPEN, CLOSE, MISTRAL = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"


def read(tools: str, texts: list[str], style: str = "added") -> Message:
    """The message of an output: at once, and a character at a time."""
    tokens = []
    for text in texts:
        if text in IDS and style == "added":
            tokens.append(Token(text, IDS[text]))
        else:
            tokens += [Token(char) for char in text]
    reading = Reading(formats(tools, style), NAMES)
    parts = parse(reading, [whole(tokens)])
    assert parse(reading, deltas(tokens, [1] * len(tokens), [])) == parts
    return message_of(parts)


NO_OBJECTS = ["[1]", "5", '"text"', '"[1]"', "true", '"{\\"a\\": NaN}"', "tru"]


@pytest.mark.parametrize("arguments", NO_OBJECTS)
@pytest.mark.parametrize("style", ["added", "plain"])
def test_arguments_that_are_no_object_make_no_call(arguments, style):
    body = f'\n{{"name": "f", "arguments": {arguments}}}\n'
    message = read("hermes", ["I look. ", OPEN, body, CLOSE], style)
    assert message.calls == []
    assert message.content == f"I look. {OPEN}{body}{CLOSE}"
    body = f'[{{"name": "f", "arguments": {arguments}}}]'
    message = read("mistral-list", [MISTRAL, body], style)
    assert (message.calls, message.content) == ([], MISTRAL + body)
    message = read("llama3_json", [f'{{"name": "f", "parameters": {arguments}}}'], style)
    assert message.calls == []
    assert message.content == f'{{"name": "f", "parameters": {arguments}}}'


@pytest.mark.parametrize("style", ["added", "plain"])
@pytest.mark.parametrize("more", ["}", "]}", "}\n}"])
def test_brackets_too_many_behind_a_call_are_no_content(style, more):
    call = '{"name": "f", "arguments": {"a": 1}}' + more
    message = read("hermes", [OPEN, call, "\n", CLOSE, "\nand", OPEN, call, CLOSE], style)
    assert [(each.name, each.arguments) for each in message.calls] == [("f", '{"a": 1}')] * 2
    assert message.content == "\nand"
    message = read("mistral", [MISTRAL, "f", "[ARGS]", '{"a": 1}' + more, MISTRAL, "f", "[ARGS]", "{}" + more])
    assert [(each.arguments) for each in message.calls] == ['{"a": 1}', "{}"]
    assert message.content is None
    message = read("llama3_json", [call.replace("arguments", "parameters")], style)
    assert ([each.arguments for each in message.calls], message.content) == (['{"a": 1}'], None)


def test_text_behind_a_call_is_content_and_its_closing_marker_is_not():
    message = read("hermes", [OPEN, '{"name": "f", "arguments": {"a": 1}}} so', CLOSE, "x", CLOSE])
    assert [(each.name, each.arguments) for each in message.calls] == [("f", '{"a": 1}')]
    assert message.content == f"}} sox{CLOSE}", "the second one closes nothing"


@pytest.mark.parametrize("arguments", ['{"a": [1}', '{"a": "b}', '{"a": {"b": 1}'])
def test_broken_arguments_are_the_models_own_text_and_never_an_empty_object(arguments):
    message = read("hermes", [OPEN, f'{{"name": "f", "arguments": {arguments}}}\n', CLOSE])
    (call,) = message.calls
    assert call.arguments.startswith(arguments)
    assert message.content is None
    turned = f'{{"arguments": {arguments}, "name": "f"}}'
    message = read("hermes", [OPEN, turned, CLOSE])
    assert (message.calls, message.content) == ([], OPEN + turned + CLOSE)


def test_a_name_without_arguments_is_a_call_where_the_object_ends_there():
    (call,) = read("hermes", [OPEN, '{"name": "f"}', CLOSE]).calls
    assert (call.name, call.arguments) == ("f", "{}")
    message = read("hermes", [OPEN, '{"name": "f", ', CLOSE])
    assert (message.calls, message.content) == ([], OPEN + '{"name": "f", ' + CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "pythonic", "mistral", "mistral-list"])
def test_a_long_call_costs_as_much_as_its_length(tools):
    """Twice the text is twice the work, and not four times: counted in processor time, with a wide margin."""

    def seconds(num: int) -> float:
        value = json.dumps({"a": "x{" * num, "b": [1] * (num // 8)})
        key = "parameters" if tools == "llama3_json" else "arguments"
        texts = {
            "hermes": [OPEN, f'{{"name": "f", "{key}": {value}}}', CLOSE],
            "llama3_json": [f'{{"name": "f", "{key}": {value}}}'],
            "pythonic": [f'[f(a="{"x{" * num}", b={json.dumps([1] * (num // 8))})]'],
            "mistral": [MISTRAL, "f", "[ARGS]", value],
            "mistral-list": [MISTRAL, f'[{{"name": "f", "arguments": {value}}}]'],
        }[tools]
        tokens = [
            token
            for text in texts
            for token in (
                [Token(text, IDS[text])] if text in IDS else [Token(text[i : i + 4]) for i in range(0, len(text), 4)]
            )
        ]
        outputs = deltas(tokens, [1] * len(tokens), [])
        reading = Reading(formats(tools, "added"), NAMES)
        started = time.process_time()
        (call,) = message_of(parse(reading, outputs)).calls
        spent = time.process_time() - started
        assert json.loads(call.arguments) == json.loads(value)
        return spent

    seconds(1000)
    # The least of a few: what else the process and the machine do then adds to some.
    assert min(seconds(16_000) for _ in range(3)) < 40 * min(seconds(2_000) for _ in range(3))


@pytest.mark.parametrize("style", ["added", "plain"])
def test_a_cut_call_is_content_unless_the_answer_must_be_calls(style):
    text = '\n{"name": "f"'
    tokens = [Token(OPEN, IDS[OPEN]), *map(Token, text)] if style == "added" else [*map(Token, OPEN + text)]
    for must, content in ((False, OPEN + text), (True, None)):
        reading = Reading(formats("hermes", style), NAMES, has_calls_alone=must)
        assert message_of(parse(reading, [whole(tokens, "length")])).content == content
        assert message_of(parse(reading, [whole(tokens)])).content == OPEN + text


def test_a_marker_that_is_cut_within_its_text_is_content_unless_the_answer_must_be_calls():
    tokens = [*map(Token, OPEN[:6])]
    for must, content in ((False, OPEN[:6]), (True, None)):
        reading = Reading(formats("hermes", "plain"), NAMES, has_calls_alone=must)
        assert message_of(parse(reading, [whole(tokens, "length")])).content == content
        assert message_of(parse(reading, deltas(tokens, [1] * len(tokens), [], "length"))).content == content
