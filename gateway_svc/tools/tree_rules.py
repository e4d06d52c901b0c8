"""Arguments as MiniMax M3 writes them, elements within elements with a marker before each tag; rules for a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza_common.call_formats.syntax import CallSyntax
from gateway_svc.parsing.argument_kinds import kinds_of, resolved
from gateway_svc.tools.lark import ANY_TEXT, MarkedText, compact_json, expression, literal
from gateway_svc.tools.xml_arguments import TREE_KEY, argument_schema, constraining_keys, string_expressions

_MAX_DEPTH = 8
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties", "$defs", "definitions"))
_NOTES = frozenset("type title description default examples deprecated $comment $schema $id format items".split())


class TreeRules:
    """Writes elements of one tool; `rules` are those that they need."""

    def __init__(self, way: CallSyntax, marked: MarkedText, root: Mapping[str, Any], index: int) -> None:
        self._mark = marked(way.markers[0])
        is_token = marked.begins_with_token(way.markers[0])
        self._text = way.markers[0]
        self._last = "" if is_token else self._text
        """The marker, where it is no token: it belongs to the greedy text before it."""
        self._root, self._index = root, index
        self.rules: list[str] = []

    def element(self, name: str, schema: Any, depth: int = 0) -> str:
        """A rule of an element; raises ValueError for a schema that it cannot keep to."""
        if TREE_KEY.fullmatch(name) is None:
            raise ValueError("has a name that its form cannot have")
        return f"{self._mark} {literal(f'<{name}>')} {self._content(schema, depth)} {literal(f'</{name}>')}"

    def _content(self, schema: Any, depth: int) -> str:
        """What is in an element, with the marker behind it."""
        schema = resolved(schema, self._root)
        if schema is True or schema == {}:
            return self._string({})
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            raise ValueError("has a schema that allows nothing, or is nested too deep")
        for name in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(name), list):
                return f"({' | '.join(self._content(each, depth + 1) for each in options)})"
        if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            return f"({' | '.join(self._exactly(each) for each in values)})"
        kinds = sorted(kinds_of(schema, self._root)) or ["string"]
        return f"({' | '.join(self._of_kind(kind, schema, depth) for kind in kinds)})"

    def _exactly(self, value: Any) -> str:
        if isinstance(value, str):
            text = literal(value) if value else ""
            return f"{text} {self._mark}" if not self._last else literal(value + self._last)
        return f"{compact_json({'const': value})} {self._mark}"

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            item = self.element("item", schema.get("items", True), depth + 1)
            if schema.keys() & {"minItems", "maxItems", "uniqueItems"} - {"minItems"} or schema.get("minItems", 0) > 1:
                raise ValueError("has a schema with a number of items, to which its form cannot keep")
            return f"({item}){'+' if schema.get('minItems') else '*'} {self._mark}"
        if kind == "object":
            if unknown := sorted(constraining_keys(schema) - _OF_OBJECTS - _NOTES):
                raise ValueError(f"has a schema with {unknown[0]}, to which its form cannot keep")
            required = schema.get("required") or ()
            parts = [
                f"({self.element(name, each, depth + 1)}){'' if name in required else '?'}"
                for name, each in (schema.get("properties") or {}).items()
            ]
            return f"{' '.join(parts)} {self._mark}"
        return f"{compact_json(argument_schema({**schema, 'type': kind}, self._root))} {self._mark}"

    def _string(self, schema: Mapping[str, Any]) -> str:
        name = f"TEXT_{self._index}_{len(self.rules)}"
        last = expression(self._last)
        parts = [f"/{each}{last}/" for each in string_expressions(schema) or [ANY_TEXT]]
        unwanted = f"~/{ANY_TEXT}{expression(self._text)}{'(?s:.+)' if last else ANY_TEXT}/"
        self.rules.append(f"{name}: {' & '.join([*parts, unwanted])}")
        return name if last else f"{name} {self._mark}"
