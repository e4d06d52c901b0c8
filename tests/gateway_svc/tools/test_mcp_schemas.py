"""Schemas as servers of MCP have them: under a tenth is refused in any format, by name, and what is made fits."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest

from gateway_svc.http.errors import ApiError
from gateway_svc.parsing.formats import Formats
from gateway_svc.requests.tools import Tool, ToolUse
from gateway_svc.tools.grammars import grammar_of, only_tool

STRING, NUMBER, FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": False}


def schema(properties: dict[str, Any], *required: str, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **others}


STRINGS = {"type": "array", "items": STRING}
EDITS = {"type": "array", "items": schema({"oldText": STRING, "newText": STRING}, "oldText", "newText", **DRAFT)}
ENTITY = schema({"name": STRING, "entityType": STRING, "observations": STRINGS}, "name", "entityType", "observations")
NODE = schema({"name": STRING, "children": {"type": "array", "items": {"$ref": "#/$defs/N"}}}, "name")
OPTIONAL = {"anyOf": [STRING, {"type": "null"}], "default": None}
SCHEMAS: dict[str, dict[str, Any]] = {
    "read_file": schema({"path": STRING, "tail": NUMBER, "head": NUMBER}, "path", **DRAFT),
    "edit_file": schema({"path": STRING, "edits": EDITS, "dryRun": {**FLAG, "default": False}}, "path", "edits"),
    "list_allowed": schema({}),
    "list_with_sizes": schema({"path": STRING, "sortBy": {"type": "string", "enum": ["name", "size"]}}, "path"),
    "fetch": schema(
        {
            "url": {"type": "string", "format": "uri", "minLength": 1, "title": "Url"},
            "max_length": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000000, "default": 5000},
            "raw": {**FLAG, "default": False},
        },
        "url",
        description="Fetches.",
    ),
    "create_entities": schema({"entities": {"type": "array", "items": ENTITY}}, "entities"),
    "think": schema(
        {"thought": STRING, "thoughtNumber": {"type": "integer", "minimum": 1}, "isRevision": FLAG}, "thought"
    ),
    "convert_time": schema({"source": STRING, "time": {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}}, "time"),
    "git_log": schema({"repo_path": STRING, "max_count": {"type": "integer", "default": 10}, "since": OPTIONAL}),
    "create_issue": schema(
        {"owner": STRING, "repo": STRING, "title": STRING, "labels": STRINGS, "milestone": NUMBER}, "owner", "repo"
    ),
    "search_code": schema({"q": STRING, "per_page": {"type": "number", "minimum": 1, "maximum": 100}}, "q"),
    "merge": schema({"number": NUMBER, "method": {"type": "string", "enum": ["merge", "squash", "rebase"]}}, "number"),
    "push_files": schema({"files": {"type": "array", "items": schema({"path": STRING, "content": STRING})}}, "files"),
    "query": schema({"sql": {**STRING, "minLength": 1}}, "sql"),
    "navigate": schema({"url": STRING, "launchOptions": {"type": "object", "default": None}}, "url"),
    "screenshot": schema({"name": STRING, "width": NUMBER, "encoded": FLAG}, "name"),
    "slack_history": schema({"channel_id": STRING, "limit": {"type": "number", "default": 10}}, "channel_id"),
    "maps": schema({"location": schema({"latitude": NUMBER, "longitude": NUMBER}), "radius": NUMBER}, "location"),
    "record": schema({"values": {"type": "object", "additionalProperties": STRING}}, "values"),
    "either": schema({"id": {"anyOf": [STRING, NUMBER]}}, "id"),
    "one_or_many": schema({"ids": {"anyOf": [STRING, STRINGS]}}, "ids"),
    "nullable": schema({"body": {"type": ["string", "null"], "maxLength": 5000}, "n": {"type": ["integer", "null"]}}),
    "tree": schema({"blocks": {"$ref": "#/$defs/blocks"}}, **{"$defs": {"blocks": {"type": "array", "items": {}}}}),
    "constant": schema({"kind": {"const": "page"}, "parent": {"anyOf": [ENTITY, {"type": "null"}]}}, "kind"),
    "one_of_two": schema({"id": STRING, "name": STRING}, anyOf=[{"required": ["id"]}, {"required": ["name"]}]),
    "exactly_one": schema({"id": STRING, "name": STRING}, oneOf=[{"required": ["id"]}, {"required": ["name"]}]),
    "wrapped": {"allOf": [schema({"a": STRING}, "a"), schema({"b": NUMBER})], "type": "object"},
    "dependent": schema({"a": STRING, "b": STRING}, dependentRequired={"a": ["b"]}),
    "sized": schema({"a": STRING, "b": STRING}, "a", minProperties=1),
    "rest": schema({"$top": NUMBER, "@type": STRING, "filter.name": STRING}),
    "slug": schema({"slug": {"type": "string", "pattern": "^[a-z0-9-]+$", "maxLength": 64}}, "slug"),
    "email": schema({"to": {"type": "array", "items": {"type": "string", "format": "email"}}, "subject": STRING}, "to"),
    "date": schema({"from": {"type": "string", "format": "date-time"}, "to": {"type": "string", "format": "date"}}),
    "mixed": schema({"value": {"oneOf": [STRING, NUMBER, FLAG, STRINGS]}}, "value"),
    "any": schema({"data": {}, "more": True}),
    "names": schema({"a": STRING}, propertyNames={"pattern": "^[a-z]+$"}),
    "lookahead": schema({"password": {"type": "string", "pattern": "^(?=.*[0-9]).{8,}$"}}, "password"),
    "uuid": schema({"id": {"type": "string", "pattern": r"^[0-9a-f]{8}-[0-9a-f]{4}$"}}, "id"),
    "described": schema({"a": {**STRING, "description": "x", "examples": ["y"], "x-order": 1}}, "a", title="Described"),
    "untyped_enum": schema({"level": {"enum": ["low", "high", None]}, "n": {"enum": [1, 2]}}, "level"),
    "wrapped_reference": schema(
        {"opts": {"allOf": [{"$ref": "#/$defs/O"}], "default": {}}}, **{"$defs": {"O": schema({"deep": FLAG})}}
    ),
    "mail_pattern": schema({"to": {"type": "string", "pattern": r"^[^@ ]+@[^@ ]+\.[a-z]{2,}$"}}, "to"),
    "letters": schema({"name": {"type": "string", "pattern": r"^\p{L}+$"}}, "name"),
    "encoded": schema({"data": {"type": "string", "contentEncoding": "base64"}}, "data"),
    "recursive": schema({"node": {"$ref": "#/$defs/N"}}, "node", **{"$defs": {"N": NODE}}),
    "pair": schema(
        {"range": {"type": "array", "prefixItems": [NUMBER, STRING], "minItems": 2, "maxItems": 2}}, "range"
    ),
    "numbered": schema({"range": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3}}, "range"),
    "map": schema({"headers": {"type": "object", "additionalProperties": STRING}}),
    "choice": schema({"op": {"anyOf": [schema({"t": {"const": "i"}}, "t"), schema({"n": NUMBER}, "n")]}}, "op"),
    "spaced": schema({"page size": NUMBER}),
}
FORMATS = (
    "hermes",
    "qwen3_coder",
    "pythonic",
    "glm45",
    "minimax_m2",
    "minimax_m3",
    "gemma4",
    "deepseek_v32",
    "kimi_k3",
    "minicpm5",
)


def refused(tools: str) -> dict[str, str]:
    """What is refused, and the message."""
    found = {}
    for name, each in SCHEMAS.items():
        use = ToolUse((Tool(name, None, each, is_strict=True),), "required")
        try:
            grammar = grammar_of(use, Formats(tools=tools), None, None)  # type: ignore[arg-type]
        except ApiError as error:
            found[name] = error.message if error.param == "tools" else ""
            continue
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
        if matcher.is_error():
            assert only_tool(grammar) == 0
            found[name] = f"tools[0]: {matcher.get_error()}"
    return found


@pytest.mark.parametrize("tools", FORMATS)
def test_under_a_tenth_is_refused_and_named(tools):
    found = refused(tools)
    assert len(found) < len(SCHEMAS) / 10, found
    assert all("tools[0]" in message for message in found.values())


@pytest.mark.parametrize(
    ("tools", "name", "good", "wrong"),
    [
        ("gemma4", "recursive", '{node:{name:"a",children:[{name:"b",children:[]}]}}', "{node:{children:[]}}"),
        ("gemma4", "numbered", "{range:[1,2,3]}", "{range:[1]}"),
        ("gemma4", "pair", '{range:[1,"a"]}', '{range:["a",1]}'),
        ("gemma4", "map", '{headers:{x:"a",y:"b"}}', "{headers:{x:1}}"),
        (
            "minimax_m3",
            "recursive",
            "<node><name>a</name><children><item><name>b</name></item></children></node>",
            "<node><children></children></node>",
        ),
        ("minimax_m3", "numbered", "<range><item>1</item><item>2</item></range>", "<range><item>1</item></range>"),
        (
            "minimax_m3",
            "pair",
            "<range><item>1</item><item>a</item></range>",
            "<range><item>a</item><item>1</item></range>",
        ),
    ],
)
def test_values_in_forms_of_their_own_keep_to_references_and_counts(tools, name, good, wrong):
    use = ToolUse((Tool("f", None, SCHEMAS[name], is_strict=True),), "required")
    grammar = grammar_of(use, Formats(tools=tools), None, None)
    for text, fits in ((good, True), (wrong, False)):
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
        ids = list(call_text(tools, text).encode())
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, text


def call_text(tools: str, text: str) -> str:
    """A call with such arguments."""
    if tools == "gemma4":
        return f"<|tool_call>call:f{text}<tool_call|>".replace('"', '<|"|>')
    mark = "]<]minimax[>["
    body = '<tool_call>\n<invoke name="f">' + text + "</invoke>\n</tool_call>"
    return body.replace("<", f"{mark}<")
