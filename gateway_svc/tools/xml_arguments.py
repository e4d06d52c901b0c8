"""Arguments that a format writes each by itself: the schema of each, and of bare text between tags types and rules.

Qwen3-Coder writes arguments as bare text between tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cadenza_common.call_formats.syntax import Tags
from cadenza_common.grammar.closing import closed
from cadenza_common.grammar.schema_kinds import Kinds, kinds_of, resolved
from gateway_svc.fields.field import as_integers
from gateway_svc.parsing.argument_kinds import TEXT
from gateway_svc.requests.tools import Tool
from gateway_svc.tools.lark import ANY_TEXT, MarkedText, compact_json, expression, literal, text_without

TAG_KEY = re.compile(r"[^\s<>\"](?:[^\n<>\"]{0,126}[^\s<>\"])?")
TREE_KEY = re.compile(r"[^\s<>/\"]{1,128}")
TYPED_KEY = re.compile(r"[^\s<>\"{}\[\],:]{1,128}")
"""Names of arguments, as tags, elements and typed values can have them."""
NOTES = frozenset(
    "title description default examples deprecated $comment format $schema $id contentEncoding contentMediaType "
    "readOnly writeOnly".split()
)
"""Keys of a schema that allow all."""
_OF_STRINGS = frozenset(("minLength", "maxLength", "pattern"))
_OF_OTHERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "minItems",
              "maxItems", "uniqueItems", "properties", "required", "additionalProperties"))  # fmt: skip
_NOT_REGULAR = re.compile(r"\\[bB1-9kuUcx]|\(\?(?!:)|(?<![\\\[])(?:\\\\)*[$^](?!\])")
"""What an expression has that llguidance's may not have within it."""
_SHARED = ("$defs", "definitions")
_WHOLE = "cadenza-whole"
"""The name, among an argument's definitions, of the schema that it is taken from."""
_MAX_KINDS = 6
_MAX_DEPTH = 64
"""Schemas that are nested deeper are refused where they are rendered."""


def argument_kinds(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Kinds]]:
    """What the arguments of tools may be."""
    return {tool.name: dict(_kinds(tool.parameters, tool.parameters)) for tool in tools if tool.parameters is not None}


def _kinds(schema: Any, root: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Kinds]]:
    """The types of an object's properties, and of what is in them by its path, as `list/item/name`."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_KINDS:
        return
    properties = schema.get("properties")
    inner = [*properties.items()] if isinstance(properties, Mapping) else []
    if depth and "items" in schema:
        inner.append(("item", schema["items"]))
    for name, each in inner:
        place = f"{path}/{name}" if path else name
        yield place, kinds_of(each, root)
        yield from _kinds(each, root, place, depth + 1)


class TagRules:
    """Writes arguments between a format's tags."""

    def __init__(self, tags: Tags, marked: MarkedText) -> None:
        self._tags, self._marked, self._quotes = tags, marked, tags.quotes
        self._pad = "\n" if tags.is_padded else ""
        self._end = tags.value_close.lstrip()
        """What stands in no value."""
        whole = self._pad + self._end
        self._token = marked.first(whole)
        """The first token of what closes a value, which stands in none either; all of it if it has none."""
        has_token = self._token in marked.tokens
        self._last = whole.partition(self._token)[0] if has_token else whole
        """What closes a value before that token: a string ends with it, or its greedy text would take it."""
        self._tail = marked(whole[len(self._last) :] + tags.behind)
        self._unwanted = self._token if has_token else ""

    def any_arguments(self, index: int) -> list[str]:
        """Rules of one argument of a tool whose arguments are free."""
        head = self._marked(self._tags.key_open)
        return [
            f"args_{index}: {head} NAME_{index} {self._key_close('string')} VALUE_{index} {self._tail}",
            rf"NAME_{index}: /[^\s<>\"]+/",
            self._terminal(str(index), []),
        ]

    def argument(self, number: str, name: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
        """Rules of the argument args_NUMBER; raises ValueError for one whose schema bare text cannot keep to."""
        schema = resolved(schema, root)
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise ValueError("has a schema that allows nothing")
        strings, others = self._split(schema, root)
        written = [f"{self._key_close(kind)} {rule}" for kind, rule in others]
        rules = []
        if strings is not None and isinstance(values := values_of(strings), list):
            written += [
                f"{self._key_close('string')} {self._exactly(each)}" for each in values if isinstance(each, str)
            ]
        elif strings is not None:
            expressions = string_expressions(strings)
            written.append(f"{self._key_close('string')} VALUE_{number}")
            rules = [self._terminal(number, expressions)]
            if self._quotes[0]:
                written.append(f"{self._key_close('string')} {literal(self._quotes[0])} QUOTED_{number}")
                rules.append(self._quoted(number, expressions))
        head = self._marked(self._tags.key_open + name)
        return [f"args_{number}: {head} ({' | '.join(written)}) {self._tail}", *rules]

    def _key_close(self, kind: str) -> str:
        tags = self._tags
        text = tags.key_close.rstrip() + self._pad
        if not any(tags.types):
            return self._marked(text)
        return self._marked(text.replace("{type}", tags.types[0] if kind == "string" else tags.types[1] or kind))

    def _split(
        self, schema: Mapping[str, Any], root: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any] | None, list[tuple[str, str]]]:
        """The schema of a value's strings, None if it is none, and the rules of other values by their types."""
        kinds = kinds_of(schema, root)
        if kinds and "string" not in kinds:
            return None, self._others(schema, root, kinds)
        values = values_of(schema)
        if values is not None:
            rest = [each for each in values if not isinstance(each, str)]
            return {"enum": values}, self._others({"enum": rest}, root, kinds - TEXT) if rest else []
        name = next((each for each in ("anyOf", "oneOf") if isinstance(schema.get(each), list)), None)
        if name is None:
            if not _is_of_strings(schema, kinds):
                raise ValueError("has a schema that bare text cannot keep to")
            rest_kinds = kinds - TEXT
            return schema, self._others({**schema, "type": sorted(rest_kinds)}, root, rest_kinds) if rest_kinds else []
        options = [resolved(each, root) for each in schema[name]]
        strings = [each for each in options if each is True or each == {} or "string" in kinds_of(each, root)]
        others = [each for each in options if each not in strings]
        found = {} if not strings or True in strings else strings[0]
        if len(strings) > 1 and not all(
            _is_of_strings(each, TEXT) and not string_expressions(each) for each in strings
        ):
            if not all(isinstance(values_of(each), list) for each in strings):
                raise ValueError("has a schema that bare text cannot keep to")
            found = {"enum": [value for each in strings for value in values_of(each) or ()]}
        inner, more = self._split(found, root) if len(strings) == 1 else (found, [])
        return inner, [*more, *(self._others({name: others}, root, kinds - TEXT) if others else [])]

    def _others(self, schema: Mapping[str, Any], root: Mapping[str, Any], kinds: Kinds) -> list[tuple[str, str]]:
        """Values that are no strings, as JSON."""
        last = f" {literal(self._last)}" if self._last else ""
        if "{type}" not in self._tags.key_close or self._tags.types[1]:
            return [("other", compact_json(argument_schema(schema, root)) + last)]
        return [
            (
                "number" if kind == "integer" else kind,
                compact_json(argument_schema({"allOf": [dict(schema)], "type": kind}, root)) + last,
            )
            for kind in sorted(kinds)
        ]

    def _exactly(self, value: str) -> str:
        if self._end in value or (self._unwanted and self._unwanted in value):
            raise ValueError("has values that bare text cannot be")
        return literal(value + self._last) if value + self._last else ""

    def _terminal(self, number: str, expressions: Sequence[str]) -> str:
        """A string and what closes it, which does not stand in it."""
        last = expression(self._last)
        parts = [f"/{each}{last}/" for each in expressions or [ANY_TEXT]]
        if self._unwanted:
            return f"VALUE_{number}: {' & '.join(parts)} & {text_without(self._unwanted)}"
        if self._quotes[0]:  # what has such characters has quotes
            parts.append(f"/[^<&\\n]*{last}/")
        return f"VALUE_{number}: {' & '.join(parts)} & ~/{ANY_TEXT}{expression(self._end)}(?s:.+)/"

    def _quoted(self, number: str, expressions: Sequence[str]) -> str:
        """A string, the quote that ends it, which does not stand in it, and what closes it."""
        quote = expression(self._quotes[1])
        parts = [f"/{each}{quote}{expression(self._last)}/" for each in expressions or [ANY_TEXT]]
        return f"QUOTED_{number}: {' & '.join(parts)} & ~/{ANY_TEXT}{quote}{ANY_TEXT}{quote}{ANY_TEXT}/"


def constraining_keys(schema: Mapping[str, Any]) -> set[str]:
    """The keys of a schema that may constrain."""
    return {key for key in schema if not key.startswith("x-")}


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None: it lists none."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def _is_of_strings(schema: Any, kinds: Kinds) -> bool:
    """Whether all that a schema says of strings can be kept to."""
    known = NOTES | _OF_STRINGS | {"type"} | (_OF_OTHERS if kinds - TEXT else set())
    return schema is True or not constraining_keys(schema) - known


def string_expressions(schema: Mapping[str, Any]) -> list[str]:
    """The expressions of strings that a schema allows; none: all. Raises ValueError for one that is not regular."""
    parts = []
    least, most = as_integers(schema.get("minLength", 0)), as_integers(schema.get("maxLength", ""))
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"(?s:.{{{least},{most}}})")
    if isinstance(pattern := schema.get("pattern"), str):
        inner = pattern.removeprefix("^")
        is_ended = inner.endswith("$") and not inner.endswith("\\$")
        inner = inner[:-1] if is_ended else inner
        if _NOT_REGULAR.search(inner):
            raise ValueError("has a pattern that bare text cannot keep to")
        inner = re.sub(r"(?<!\\)/", r"\/", inner)
        start, end = "" if pattern.startswith("^") else "(?s:.*)", "" if is_ended else "(?s:.*)"
        parts.append(f"{start}(?:{inner}){end}")
    return parts


def argument_schema(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one argument as a document; whole: the schema of all arguments, to which references point."""
    found: dict[str, Any] = _moved(dict(schema))
    found |= {name: _moved(whole[name]) for name in _SHARED if name in whole}
    if _refers(found):
        others = {name: _moved(value) for name, value in whole.items() if name not in _SHARED}
        found["$defs"] = {**found.get("$defs", {}), _WHOLE: others}
    return closed(found)


def _moved(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """A part of a schema, in which references to the whole one are to its new place."""
    if isinstance(value, list) and depth:
        return [_moved(each, depth - 1) for each in value]
    if not isinstance(value, dict) or not depth:
        return value
    return {
        name: _place(inner) if name == "$ref" and isinstance(inner, str) else _moved(inner, depth - 1)
        for name, inner in value.items()
    }


def _place(reference: str) -> str:
    is_moved = reference == "#" or (reference.startswith("#/") and reference.split("/")[1] not in _SHARED)
    return f"#/$defs/{_WHOLE}{reference[1:]}" if is_moved else reference


def _refers(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether there is a reference to the whole schema."""
    if not isinstance(value, (dict, list)) or not depth:
        return False
    inner = value.values() if isinstance(value, dict) else value
    reference = value.get("$ref") if isinstance(value, dict) else None
    is_whole = isinstance(reference, str) and reference.startswith(f"#/$defs/{_WHOLE}")
    return is_whole or any(_refers(each, depth - 1) for each in inner)
