"""A request's constraint as rules of a grammar, so that a thought may stand before what it constrains."""

from __future__ import annotations

import json
import re
from typing import Any

from cadenza.structured_outputs import StructuredOutputsParams
from gateway_svc.tools.lark import literal

_IS_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*[:\[])", re.MULTILINE)
_HEADER = re.compile(r"^\s*%llguidance\s*\{[^\n]*\}\s*$", re.MULTILINE)
_TAKEN = re.compile(r"^\s*(?:answer|thought|THOUGHT|SPACE)\s*[:\[{.]", re.MULTILINE)
"""Names that a caller's grammar has, and the grammar around it too."""
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|\#)[^\n]*|\bstart\b')
_REGEX_PART = re.compile(r"\\.|/|\n|\r", re.DOTALL)
_IN_REGEX = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}


def answer_rules(given: StructuredOutputsParams) -> list[str] | None:
    """Rules of Lark, of which `answer` is the constraint; None for one that cannot be written so."""
    if given.choice is not None:
        return ["answer: " + " | ".join(map(literal, given.choice))]
    if given.regex is not None:
        regex = _REGEX_PART.sub(lambda found: _IN_REGEX.get(found.group(), found.group()), given.regex)
        return [f"answer: /{regex}/"]
    if given.grammar is not None:
        return _of_lark(given.grammar)
    schema = schema_of(given, with_whitespace=True)
    return None if schema is None else [f"answer: %json {json.dumps(schema, ensure_ascii=False)}"]


def schema_of(given: StructuredOutputsParams, *, with_whitespace: bool = False) -> dict[str, Any] | None:
    """The JSON schema that an output must fit; None for other constraints.

    with_whitespace: what the constraint says about whitespace is added; without, such a constraint is another one.
    """
    spaces: dict[str, Any] = {}
    if given.disable_any_whitespace:
        spaces["whitespace_flexible"] = False
    elif given.whitespace_pattern:
        spaces["whitespace_pattern"] = given.whitespace_pattern
    if given.disable_additional_properties or (spaces and not with_whitespace):
        return None
    if given.json_object:
        schema: Any = {"type": "object"}
    elif given.json is not None:
        schema = json.loads(str(given.json))
    else:
        return None
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        return None
    return {**schema, "x-guidance": spaces} if spaces else schema


def _of_lark(grammar: str) -> list[str] | None:
    """A grammar whose beginning is called answer; None for GBNF, and for names that are taken."""
    if not _IS_LARK.search(grammar) or _TAKEN.search(grammar):
        return None
    renamed = _LARK_TOKEN.sub(lambda found: "answer" if found.group() == "start" else found.group(), grammar)
    header = _HEADER.match(renamed)
    if header is None:
        return [renamed]
    return [header.group().strip(), renamed[header.end() :]]
