"""Calls in a thought that is never closed are calls if the output ends with them; other drafts are the thought's."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza.outputs import CompletionOutput
from cadenza_common.call_formats.names import ToolFormat
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.output import Message, OutputParser, Reading
from gateway_svc.parsing.parts import Marker, Role
from gateway_svc.parsing.reasoning import Opening

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>'
QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
MISTRAL = '[TOOL_CALLS]f[ARGS]{"a": "1"}'
FORMATS: list[tuple[ToolFormat, str]] = [("hermes", HERMES), ("qwen3_coder", QWEN), ("mistral", MISTRAL)]
MARKERS = {
    "hermes": ((Role.CALL, "<tool_call>"), (Role.CALL_END, "</tool_call>")),
    "qwen3_coder": ((Role.CALL, "<tool_call>"), (Role.CALL_END, "</tool_call>")),
    "mistral": ((Role.CALL, "[TOOL_CALLS]"), (Role.ARGUMENTS, "[ARGS]")),
}
THOUGHT = (Marker(Role.THOUGHT, "<think>"), Marker(Role.THOUGHT_END, "</think>"))


def read(tools: ToolFormat, text: str, opening: Opening = Opening.OPEN, reason: Any = "stop") -> Message:
    """The message of an output, which is the same for every cut."""
    formats = Formats(tools, "qwen3", tuple(Marker(*each) for each in MARKERS[tools]), THOUGHT)
    found = []
    for size in (1, 7, len(text)):
        parser, message = OutputParser(Reading(formats, ("f", "g"), opening=opening), [], with_tokens=True), Message()
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            end = reason if start + size >= len(text) else None
            ends = range(start + 1, start + len(piece) + 1)
            ids = [ord(each) for each in piece]
            message.add(
                parser.feed(CompletionOutput(0, text=piece, token_ids=ids, text_ends=[*ends], finish_reason=end))
            )
        message.num_reasoning_tokens = parser.num_reasoning_tokens
        found.append(message)
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize(("tools", "call"), FORMATS)
def test_calls_that_an_open_thought_ends_with_are_calls(tools: ToolFormat, call: str) -> None:
    """https://github.com/vllm-project/vllm/pull/35687"""
    message = read(tools, "I must look. " + call)
    assert [(each.name, each.arguments) for each in message.calls] == [("f", '{"a": "1"}')]
    assert (message.thought, message.content) == ("I must look. ", None)
    assert 0 < message.num_reasoning_tokens < len("I must look. " + call)
    assert read(tools, "<think>x" + call, Opening.MAYBE).calls == message.calls
    assert len(read(tools, f"I must look. {call}\n{call}\n").calls) == 2


@pytest.mark.parametrize(("tools", "call"), FORMATS)
def test_drafts_of_calls_are_the_thoughts_text(tools: ToolFormat, call: str) -> None:
    """https://github.com/PrimeIntellect-ai/renderers/pull/80"""
    message = read(tools, f"Perhaps {call}</think>It is 5.")
    assert (message.thought, message.content, message.calls) == (f"Perhaps {call}", "It is 5.", [])
    message = read(tools, f"Perhaps {call}\nNo, this:\n{call}")
    assert (message.thought, len(message.calls)) == (f"Perhaps {call}\nNo, this:\n", 1)
    message = read(tools, f"Perhaps {call} No.")
    assert (message.thought, message.content, message.calls) == (f"Perhaps {call} No.", None, [])
    message = read(tools, f"Perhaps {call}</think>{call}")
    assert (message.thought, len(message.calls)) == (f"Perhaps {call}", 1)


@pytest.mark.parametrize(("tools", "call"), FORMATS)
def test_a_thought_that_is_cut_has_no_calls(tools: ToolFormat, call: str) -> None:
    for text in (f"Perhaps {call}", f"Perhaps {call[:20]}"):
        message = read(tools, text, reason="length")
        assert (message.thought, message.content, message.calls) == (text, None, [])
    marker = call[: call.index(">" if "<" in call else "]") + 1]
    assert read(tools, f"A {marker} begins one").thought == f"A {marker} begins one"
