"""Finds the formats of a model: that which reads what the chat template makes of a call is the model's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from cadenza.info import ChatExamples, ModelInfo
from cadenza_common.call_formats.catalog import BY_NAME, FORMATS
from cadenza_common.call_formats.examples import (
    EXAMPLE_CALLS,
    EXAMPLE_RESULT,
    EXAMPLE_THOUGHT,
    EXAMPLE_TOOLS,
    EXAMPLE_USER,
)
from cadenza_common.call_formats.names import ReasoningFormat, ToolFormat
from cadenza_common.call_formats.syntax import CallSyntax, ThoughtSyntax, ToolSyntax
from cadenza_common.call_formats.thoughts import THOUGHTS
from gateway_svc.parsing.call_reader import CallReader
from gateway_svc.parsing.composing import MarkJoiner
from gateway_svc.parsing.markers import pieces_and_composed, tool_roles
from gateway_svc.parsing.message import Message
from gateway_svc.parsing.parts import Marker
from gateway_svc.parsing.pieces import PieceReader

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_CODE = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_MAX_STRING = 64
"""Characters of a string of a template's code that writes a marker; longer ones are prose."""
_MARKS = [arguments["qmname"] for _, arguments in EXAMPLE_CALLS]
_KINDS = {
    each["function"]["name"]: {
        key: frozenset((value["type"],)) for key, value in each["function"]["parameters"]["properties"].items()
    }
    for each in EXAMPLE_TOOLS
}


def detect_tools(examples: ChatExamples | None) -> tuple[ToolFormat | None, CallSyntax | None]:
    """The format that reads the calls that a chat template shows, and its way; None: no known one, or it shows none."""
    if examples is None or not examples.call:
        return None, None
    found = [(*_cost(examples, syntax, way), syntax, way) for syntax in FORMATS for way in syntax.ways]
    read = [each for each in found if each[0]]
    if not read:
        return None, None
    _, _, syntax, way = min(read, key=lambda each: each[1])
    name = next(each for each in get_args(ToolFormat) if each == syntax.name)
    return name, way


def way_of(examples: ChatExamples | None, name: ToolFormat) -> CallSyntax | None:
    """The way of a format that a chat template shows; None: it reads none of its calls, or there are none."""
    if examples is None or not examples.call:
        return None
    syntax = BY_NAME[name]
    costs = [(*_cost(examples, syntax, way), way) for way in syntax.ways]
    return min(((left, way) for is_read, left, way in costs if is_read), default=(0, None), key=lambda each: each[0])[1]


def _cost(examples: ChatExamples, syntax: ToolSyntax, way: CallSyntax) -> tuple[bool, int]:
    """Whether a way reads the calls of examples, and how much of them it leaves as text."""
    total = 0
    if way.bare is None and way.markers[0] not in examples.call:
        return False, 0
    for text, num in ((examples.call, 1), (examples.calls, 2)):
        if not all(mark in text for mark in _MARKS[:num]):  # as of templates that show the first call alone
            continue
        best = [left for turn in _turns(examples, text) if (left := _left(turn, syntax, way, num)) is not None]
        if not best:
            return False, 0
        total += min(best)
    return True, total


def _turns(examples: ChatExamples, text: str) -> list[str]:
    """What may be the model's own of a chat: behind the prompt, behind what both have, or behind the user's text."""
    header, rest = (each[each.rfind(EXAMPLE_USER) + len(EXAMPLE_USER) :] for each in (examples.prompt, text))
    rest = rest.partition(EXAMPLE_RESULT)[0]
    size = next((at for at, (one, other) in enumerate(zip(header, rest, strict=False)) if one != other), len(header))
    common = rest[:size]
    cuts = {0, size, common.rfind(">") + 1, common.rfind("\n") + 1}
    return [rest[cut:] for cut in cuts]


def _left(turn: str, syntax: ToolSyntax, way: CallSyntax, num: int) -> int | None:
    """How much of a turn is no call where it has these calls; None: it has others."""
    message = read_calls(turn, replace(syntax, ways=(way,)))
    try:
        calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
    except ValueError:
        return None
    return len(message.content or "") if calls == [*EXAMPLE_CALLS[:num]] else None


def shown_calls(text: str, examples: ChatExamples, name: ToolFormat) -> list[tuple[str, object]]:
    """The calls that a format reads in an example, of the turn in which it reads the most."""
    read = [read_calls(turn, BY_NAME[name]).calls for turn in _turns(examples, text)]
    return [(call.name, json.loads(call.arguments)) for call in max(read, key=len)]


def read_calls(text: str, syntax: ToolSyntax) -> Message:
    """The calls of the examples' tools in a text."""
    markers, composed = pieces_and_composed(tuple(Marker(*each) for each in tool_roles(syntax)))
    reader, joiner = PieceReader(markers, skips_special=False), MarkJoiner(markers, composed)
    calls = CallReader(syntax, [*markers, *composed], [name for name, _ in EXAMPLE_CALLS], _KINDS)
    message = Message()
    pieces = [*reader.feed(text, [], []), *reader.finish()]
    joined = [*(each for piece in pieces for each in joiner.feed(piece)), *joiner.finish()]
    for piece in joined:
        message.add([*calls.feed(piece)])
    message.add([*calls.finish(is_cut=False)])
    return message


def detect_reasoning(info: ModelInfo) -> ReasoningFormat | None:
    """The format of the thoughts that a chat template shows, or that its prompt, its text or its tokens have."""
    shown = info.chat_examples
    texts = {token.text for token in info.added_tokens}
    strings = _short_strings(info.chat_template)
    checks: tuple[Callable[[ThoughtSyntax], bool], ...] = (
        lambda each: shown is not None and any(_shows(text, each) for text in (shown.thought, shown.thought_and_call)),
        lambda each: shown is not None and _ends(shown.prompt.rstrip(), each),
        lambda each: _is_written(each, strings, info.chat_template),
        lambda each: {each.open, each.close} <= texts and not each.hint,
    )
    for check in checks:
        for syntax in THOUGHTS:
            if not syntax.always and check(syntax):
                return _refined(syntax, info)
    return None


def _shows(text: str, syntax: ThoughtSyntax) -> bool:
    opening, closing = re.escape(syntax.open), re.escape(syntax.close)
    return re.search(rf"{opening}\s*{EXAMPLE_THOUGHT}\s*{closing}", text) is not None


def _ends(prompt: str, syntax: ThoughtSyntax) -> bool:
    """Whether a prompt opens a thought, or has closed one."""
    return prompt.endswith(syntax.open.rstrip()) or (prompt.endswith(syntax.close) and syntax.open in prompt)


def _is_written(syntax: ThoughtSyntax, strings: Sequence[str], template: str) -> bool:
    """Whether the template's code writes what opens a thought; where a format has a hint, by that alone."""
    if syntax.hint:
        return syntax.open in template and syntax.hint in template
    opening = syntax.open.strip()
    return any(text.startswith(opening) or text.endswith(opening) for text in strings)


def _short_strings(template: str) -> list[str]:
    """The strings in a template's code: what it says outside of them, and in comments, is shown or left out."""
    code = _CODE.findall(_COMMENT.sub("", template))
    found = ((one or other).replace("\\n", "\n").strip() for each in code for one, other in _STRING.findall(each))
    return [text for text in found if 0 < len(text) <= _MAX_STRING]


def _refined(syntax: ThoughtSyntax, info: ModelInfo) -> ReasoningFormat:
    """The format with texts around the answer where the template has these."""
    same = [each for each in THOUGHTS if (each.open, each.close) == (syntax.open, syntax.close) and not each.always]
    found = next((each for each in same if each.hint in info.chat_template), syntax)
    return next(each for each in get_args(ReasoningFormat) if each == found.name)
