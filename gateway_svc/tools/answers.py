"""A request's own constraint beside tools and behind a thought: a schema, or rules of a grammar."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from cadenza.structured_outputs import StructuredOutputsParams
from cadenza_common.grammar.closing import closed
from cadenza_common.grammar.json_schema import OPTIONS, whole_sizes, with_whitespace
from cadenza_common.grammar.readable import readable
from gateway_svc.http.errors import bad_request
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.parts import Role
from gateway_svc.parsing.reasoning import Opening
from gateway_svc.requests.tools import ToolUse
from gateway_svc.tools.grammars import thought_then
from gateway_svc.tools.lark import literal

_IS_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*[:\[])", re.MULTILINE)
_HEADER = re.compile(r"^\s*%llguidance\s*\{[^\n]*\}\s*$", re.MULTILINE)
_TAKEN = re.compile(r"^\s*(?:answer|thought|THOUGHT|SPACE)\s*[:\[{.]", re.MULTILINE)
"""Names that a caller's grammar has, and the grammar around it too."""
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|\#)[^\n]*|\bstart\b')
_REGEX_PART = re.compile(r"\\.|/|\n|\r", re.DOTALL)
_IN_REGEX = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}


def schema_beside(use: ToolUse, given: StructuredOutputsParams, name: str) -> dict[str, Any] | None:
    """The JSON schema of content beside tools; name: the field of the constraint.

    Raises ApiError for a constraint that excludes them. An answer that must be calls has no content, which keeps to any
    format of content.
    """
    schema = schema_of(given)
    if schema is None:
        raise bad_request(
            f"{name} beside tools must be JSON without further options: other constraints exclude calls", name
        )
    if use.mode == "required" and name == "structured_outputs":
        raise bad_request(f"{name} and a tool_choice that demands a call exclude each other", name)
    return schema


def behind_thought(
    given: StructuredOutputsParams, formats: Formats, opening: Opening, name: str
) -> StructuredOutputsParams:
    """A constraint on the answer alone; raises ApiError for one that would constrain the thought."""
    if opening.is_past or given.start_after_token_ids:
        return given
    end = formats.marker(Role.THOUGHT_END).token_id
    must_think = opening is Opening.OPEN or formats.always_thinks
    rules = answer_rules(given)
    if rules is not None and (schema_of(given) is not None or not must_think or end is None):
        return StructuredOutputsParams(grammar=thought_then(formats, opening, rules))
    if must_think and end is not None:
        return replace(given, start_after_token_ids=[end])
    if must_think:
        raise bad_request(
            f"{name}: the model's thought ends with no token of its own, behind which this could begin", name
        )
    return given


def answer_rules(given: StructuredOutputsParams) -> list[str] | None:
    """Rules of Lark, of which `answer` is the constraint; None for one that cannot be written so."""
    if given.choice is not None:
        return ["answer: " + " | ".join(map(literal, given.choice))]
    if given.regex is not None:
        regex = _REGEX_PART.sub(lambda found: _IN_REGEX.get(found.group(), found.group()), given.regex)
        return [f"answer: /{regex}/"]
    if given.grammar is not None:
        return _of_lark(given.grammar)
    schema = schema_of(given, with_spaces=True)
    return None if schema is None else [f"answer: %json {json.dumps(schema, ensure_ascii=False)}"]


def schema_of(given: StructuredOutputsParams, *, with_spaces: bool = False) -> dict[str, Any] | None:
    """The JSON schema that an output must fit; None for other constraints.

    with_spaces: what the constraint says about whitespace is added; without, such a constraint is another one.
    """
    spaces: dict[str, Any] = {}
    if given.disable_any_whitespace:
        spaces["whitespace_flexible"] = False
    elif given.whitespace_pattern:
        spaces["whitespace_pattern"] = given.whitespace_pattern
    if spaces and not with_spaces:
        return None
    if given.json_object:
        schema: Any = {"type": "object"}
    elif given.json is not None:
        schema = json.loads(str(given.json), object_hook=whole_sizes)
    else:
        return None
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        return None
    found = closed(readable(schema)) if given.disable_additional_properties else readable(schema)
    if not with_spaces:
        return found
    return {**found, OPTIONS: spaces} if spaces else with_whitespace(found)


def _of_lark(grammar: str) -> list[str] | None:
    """A grammar whose beginning is called answer; None for GBNF, and for names that are taken."""
    if not _IS_LARK.search(grammar) or _TAKEN.search(grammar):
        return None
    renamed = _LARK_TOKEN.sub(lambda found: "answer" if found.group() == "start" else found.group(), grammar)
    header = _HEADER.match(renamed)
    if header is None:
        return [renamed]
    return [header.group().strip(), renamed[header.end() :]]
