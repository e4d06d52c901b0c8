"""The rules of one tool's call, in the way of the model: its name, and arguments that keep to the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cadenza_common.call_formats.syntax import Body, CallSyntax
from gateway_svc.http.errors import bad_request
from gateway_svc.parsing.python_call import KEY
from gateway_svc.requests.tools import Tool
from gateway_svc.tools.lark import MarkedText, compact_json, literal
from gateway_svc.tools.tree_rules import TreeRules
from gateway_svc.tools.typed_arguments import TypedRules
from gateway_svc.tools.xml_arguments import XML_KEY, TagRules, argument_schema

_NOTES = frozenset(
    (
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "additionalProperties",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "properties",
        "required",
        "title",
        "type",
    )
)
"""What a schema of arguments may have that are written one by one."""
_CHOICES = ("allOf", "anyOf", "oneOf")


class CallRules:
    """Writes `call_INDEX`, from the name on, and what it needs."""

    def __init__(self, tool: Tool, index: int, way: CallSyntax, marked: MarkedText, *, must_fit: bool) -> None:
        """must_fit: whether the arguments keep to the schema, and are no object of any kind."""
        self._tool, self._index, self._way, self._marked = tool, index, way, marked
        self._must_fit = must_fit
        self._where = f"tools[{index}]"

    def all(self) -> list[str]:
        """The rules; raises ApiError for a schema that cannot be kept to in this way."""
        match self._way.body:
            case Body.OBJECT:
                return self._object()
            case Body.JSON:
                arguments = f"args_{self._index}"
                return [f"{arguments}: {compact_json(self._schema())}", self._call(arguments)]
            case Body.TAGS:
                return self._tags()
            case Body.PYTHON:
                return self._python()
            case Body.TREE:
                return self._tree()
        return self._typed()

    def _call(self, arguments: str, last: str = "") -> str:
        head, tail = self._marked(self._tool.name + self._way.separator), self._marked(last + self._way.call[1])
        return f"call_{self._index}: {head} {arguments} {tail}".rstrip()

    def _object(self) -> list[str]:
        name_key, argument_key = self._way.keys
        head = f'{{"{name_key}": {json.dumps(self._tool.name)}, "{argument_key}": '
        tail = self._marked("}" + self._way.call[1])
        arguments = f"args_{self._index}"
        return [
            f"{arguments}: {compact_json(self._schema())}",
            f"call_{self._index}: {literal(head)} {arguments} {tail}",
        ]

    def _schema(self) -> dict[str, Any]:
        """What its arguments must be; any object where nothing is to be checked."""
        parameters = self._tool.parameters
        if parameters is None or not self._must_fit:
            return {"type": "object"}
        return {"type": "object", **parameters}

    def _properties(self, key: re.Pattern[str]) -> tuple[Mapping[str, Any], Sequence[str]] | None:
        """The properties of the schema and which of them are required; None: it names none. Raises ApiError."""
        parameters = self._tool.parameters or {}
        if not self._must_fit:
            names = parameters.get("properties") if isinstance(parameters.get("properties"), dict) else {}
            known = [name for name in names or {} if key.fullmatch(name)]
            return (dict.fromkeys(known, True), ()) if known else None
        schema = merged(parameters)
        unknown = sorted(name for name in set(schema) - _NOTES if not name.startswith("x-"))
        if unknown:
            raise bad_request(f"{self._where}: a call in the model's form cannot keep to {unknown[0][:64]}", "tools")
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        for name in [*properties, *required]:
            if not isinstance(name, str) or key.fullmatch(name) is None or name not in properties:
                message = f"{self._where}: a call in the model's form cannot have the argument {name!a:.64}"
                raise bad_request(message, "tools")
        return (properties, required) if "properties" in schema else None

    def _tags(self) -> list[str]:
        """A tag for each argument, in the order of the properties; any ones where the schema names none."""
        assert self._way.tags is not None
        tags = TagRules(self._way.tags, self._marked)
        found = self._properties(XML_KEY) if self._must_fit else None
        end = self._way.tags.end
        if found is None:
            return [*tags.any_arguments(self._index), self._call(f"args_{self._index}*", end)]
        properties, required = found
        rules: list[str] = []
        for name, rule in self._written(properties, tags):
            rules += rule
            del name
        rest = [
            f"args_{self._index}_{place}" + ("" if name in required else "?") for place, name in enumerate(properties)
        ]
        return [*rules, self._call(" ".join(rest), end)]

    def _written(self, properties: Mapping[str, Any], tags: TagRules) -> Iterator[tuple[str, list[str]]]:
        for place, (name, value) in enumerate(properties.items()):
            try:
                yield name, tags.argument(f"{self._index}_{place}", name, value, self._tool.parameters or {})
            except ValueError as error:
                raise bad_request(f"{self._where}: the argument {name!a:.64} {error}", "tools") from None

    def _python(self) -> list[str]:
        """name(key=value, …): the properties in their order, those that are not required may be left out."""
        properties, required = self._properties(KEY) or ({}, ())
        rules = []
        for place, (name, value) in enumerate(properties.items()):
            value = value if isinstance(value, dict) else {} if value is True else {"not": {}}
            own = compact_json(argument_schema(value, self._tool.parameters or {}))
            rules.append(f"args_{self._index}_{place}: {literal(name + '=')} {own}")
        return [*rules, self._call(comma_separated(self._index, list(properties), set(required)), ")")]

    def _tree(self) -> list[str]:
        """An element for each argument, in the order of the properties."""
        properties, required = self._properties(XML_KEY) or ({}, ())
        tree = TreeRules(self._way, self._marked, self._tool.parameters or {}, self._index)
        parts = []
        for name, value in properties.items():
            try:
                parts.append(f"({tree.element(name, value)}){'' if name in required else '?'}")
            except ValueError as error:
                raise bad_request(f"{self._where}: the argument {name!a:.64} {error}", "tools") from None
        arguments = f"args_{self._index}"
        return [*tree.rules, f"{arguments}: {' '.join(parts)}", self._call(arguments)]

    def _typed(self) -> list[str]:
        """name{key:value,…}, with values in the format's own form."""
        properties, required = self._properties(XML_KEY) or ({}, ())
        typed = TypedRules(self._way, self._marked, self._tool.parameters or {}, self._index)
        rules = []
        for place, (name, value) in enumerate(properties.items()):
            try:
                rules.append(f"args_{self._index}_{place}: {literal(name + ':')} {typed.value(value)}")
            except ValueError as error:
                raise bad_request(f"{self._where}: the argument {name!a:.64} {error}", "tools") from None
        arguments = comma_separated(self._index, list(properties), set(required), ",")
        return [*rules, *typed.rules, self._call(arguments, "}")]


def merged(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of an object whose choices are taken in where there is one, or where they only say what is required."""
    found = dict(schema)
    for name in _CHOICES:
        options = found.get(name)
        if not isinstance(options, list) or not all(isinstance(each, Mapping) for each in options):
            continue
        if len(options) == 1 and not (set(options[0]) & set(found) - {"type", "description", "title"}):
            del found[name]
            found |= {key: value for key, value in options[0].items() if key not in found}
    return found


def comma_separated(index: int, names: Sequence[str], required: set[str], comma: str = ", ") -> str:
    """A rule for the arguments: the required ones, any of the others, and commas between them."""
    rest = [f"args_{index}_{place}" for place in range(len(names))]
    between = literal(comma)

    def behind(place: int) -> str:
        return f"{between} {rest[place]}" if names[place] in required else f"({between} {rest[place]})?"

    first = next((place for place, name in enumerate(names) if name in required), None)
    if first is not None:  # commas belong to what stands before and behind it
        before = [f"({rest[place]} {between})?" for place in range(first)]
        return " ".join([*before, rest[first], *map(behind, range(first + 1, len(names)))])
    options = [
        " ".join([rest[place], *(f"({between} {each})?" for each in rest[place + 1 :])]) for place in range(len(names))
    ]
    return f"({' | '.join(options)})?" if options else ""
