"""Writes calls and thoughts as a model does: for histories whose template shows none, for pages, and for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza_common.call_formats.syntax import Body, CallSyntax, ThoughtSyntax

WrittenCall = tuple[str, Mapping[str, Any]]
"""The name and the arguments."""


def written_calls(way: CallSyntax, calls: Sequence[WrittenCall]) -> str:
    """Calls in one way; raises ValueError for arguments that it cannot have."""
    section = [holes_filled(text, {"{name}": calls[0][0]}) for text in way.section]
    texts = [_call(way, name, arguments, index) for index, (name, arguments) in enumerate(calls)]
    return section[0] + way.between.join(texts) + section[1]


def written_thought(syntax: ThoughtSyntax, thought: str) -> str:
    """A thought, and what stands between it and the answer."""
    return f"{syntax.open}{thought}{syntax.close}{syntax.then}"


def holes_filled(text: str, values: Mapping[str, str]) -> str:
    """A literal with values in its holes."""
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _call(way: CallSyntax, name: str, arguments: Mapping[str, Any], index: int) -> str:
    filled = {"{id}": way.id_form.replace("{index}", str(index)), "{index}": str(index)}
    opening, closing, separator = (holes_filled(text, filled) for text in (*way.call, way.separator))
    if way.body is Body.OBJECT:
        name_key, argument_key = way.keys
        return opening + json.dumps({name_key: name, argument_key: arguments}, ensure_ascii=False) + closing
    return opening + name + separator + _arguments(way, arguments) + closing


def _arguments(way: CallSyntax, arguments: Mapping[str, Any]) -> str:
    if way.body is Body.JSON:
        return json.dumps(arguments, ensure_ascii=False)
    if way.body is Body.PYTHON:
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
    if way.body is Body.TYPED:
        quote = way.markers[-1]
        return ",".join(f"{key}:{_typed(value, quote)}" for key, value in arguments.items()) + "}"
    if way.body is Body.TREE:
        return "".join(_element(way.markers[0], key, value) for key, value in arguments.items())
    assert way.tags is not None
    return "".join(_tagged(way, key, value) for key, value in arguments.items()) + way.tags.end


def _tagged(way: CallSyntax, key: str, value: Any) -> str:
    tags = way.tags
    assert tags is not None
    is_text = isinstance(value, str)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if is_text and any(each in text for each in "<&\n"):
        text = tags.quotes[0] + text + tags.quotes[1]
    if is_text and tags.value_close.strip() in text:
        raise ValueError("a text with the tag that closes it cannot be written")
    kind = tags.types[0] if is_text else tags.types[1] or _KINDS.get(type(value), "null")
    return f"{tags.key_open}{key}{holes_filled(tags.key_close, {'{type}': kind})}{text}{tags.value_close}{tags.behind}"


_KINDS = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


def _element(mark: str, name: str, value: Any) -> str:
    if isinstance(value, (dict, list)):
        inner = value.items() if isinstance(value, dict) else (("item", each) for each in value)
        text = "".join(_element(mark, key, each) for key, each in inner)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
        if mark in text:
            raise ValueError("a text with the marker of tags cannot be written")
    return f"{mark}<{name}>{text}{mark}</{name}>"


def _typed(value: Any, quote: str) -> str:
    match value:
        case str():
            if quote in value:
                raise ValueError("a text with the marker that ends it cannot be written")
            return quote + value + quote
        case list():
            return f"[{','.join(_typed(each, quote) for each in value)}]"
        case dict():
            return f"{{{','.join(f'{key}:{_typed(each, quote)}' for key, each in value.items())}}}"
    return json.dumps(value)
