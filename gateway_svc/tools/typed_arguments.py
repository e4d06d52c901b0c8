"""Values as Gemma 4 writes them: strings between markers, bare keys, no space; as rules that keep to a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza_common.call_formats.syntax import CallSyntax
from gateway_svc.parsing.argument_kinds import kinds_of, resolved
from gateway_svc.tools.lark import ANY_TEXT, MarkedText, compact_json, expression, literal
from gateway_svc.tools.xml_arguments import TYPED_KEY, argument_schema, constraining_keys, string_expressions

_MAX_DEPTH = 8
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties", "$defs", "definitions"))
_OF_LISTS = frozenset(("items", "minItems", "maxItems"))
_NOTES = frozenset("type title description default examples deprecated $comment $schema $id format".split())


class TypedRules:
    """Writes values of one tool; `rules` are those that they need."""

    def __init__(self, way: CallSyntax, marked: MarkedText, root: Mapping[str, Any], index: int) -> None:
        self._quote_text = way.markers[-1]
        self._quote = marked(self._quote_text)
        is_token = marked.begins_with_token(self._quote_text)
        self._last = "" if is_token else self._quote_text
        """What ends a string and is no token: it belongs to the string's greedy text."""
        self._tail = self._quote if is_token else ""
        self._root, self._index = root, index
        self.rules: list[str] = []
        self._has_any = False

    def value(self, schema: Any, depth: int = 0) -> str:
        """A rule for a value; raises ValueError for a schema that it cannot keep to."""
        schema = resolved(schema, self._root)
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise ValueError("has a schema that allows nothing")
        if depth > _MAX_DEPTH:
            raise ValueError("is nested too deep")
        for name in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(name), list):
                return f"({' | '.join(self.value(each, depth + 1) for each in options)})"
        if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            return f"({' | '.join(self._exactly(each) for each in values)})"
        kinds = sorted(kinds_of(schema, self._root))
        if not kinds:
            return self._any()
        return f"({' | '.join(self._of_kind(kind, schema, depth) for kind in kinds)})"

    def _exactly(self, value: Any) -> str:
        if isinstance(value, str):
            text = literal(value + self._last) if value + self._last else ""
            return f"{self._quote} {text} {self._tail}"
        return compact_json({"const": value})

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            self._check(schema, _OF_LISTS)
            item = self.value(schema.get("items", True), depth + 1)
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            if least in (0, 1) and most is None:
                return f'"[" ({item} ("," {item})*){"" if least else "?"} "]"'
            more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'
        if kind == "object":
            return self._object(schema, depth)
        return compact_json(argument_schema({**schema, "type": kind}, self._root))

    def _check(self, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        if unknown := sorted(constraining_keys(schema) - known - _NOTES - {"enum"}):
            raise ValueError(f"has a schema with {unknown[0]}, to which its form cannot keep")

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        self._check(schema, _OF_OBJECTS)
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not properties:
            value = self._any()
            return f'"{{" (/[^:,{{}}\\[\\]]+:/ {value} ("," /[^:,{{}}\\[\\]]+:/ {value})*)? "}}"'
        if any(TYPED_KEY.fullmatch(name) is None for name in properties):
            raise ValueError("has a name that its form cannot have")
        parts, is_first = [], True
        for name in sorted(properties, key=lambda each: each not in required):
            one = f"{literal(name + ':')} {self.value(properties[name], depth + 1)}"
            one = one if is_first else f'"," {one}'
            parts.append(one if name in required else f"({one})?")
            is_first = is_first and name not in required
        if is_first and len(parts) > 1:  # none is required: only a first part of them is written
            return f'"{{" {self._beginnings(properties, depth)} "}}"'
        return f'"{{" {" ".join(parts)} "}}"'

    def _beginnings(self, properties: Mapping[str, Any], depth: int) -> str:
        found = ""
        for name in reversed(list(properties)):
            one = f"{literal(name + ':')} {self.value(properties[name], depth + 1)}"
            found = f'({one} ("," {found})?)' if found else f"({one})"
        return f"{found}?"

    def _string(self, schema: Mapping[str, Any]) -> str:
        name = f"STRING_{self._index}_{len(self.rules)}"
        last = expression(self._last)
        parts = [f"/{each}{last}/" for each in string_expressions(schema) or [ANY_TEXT]]
        unwanted = f"~/{ANY_TEXT}{expression(self._quote_text)}{'(?s:.+)' if last else ANY_TEXT}/"
        self.rules.append(f"{name}: {' & '.join([*parts, unwanted])}")
        return f"{self._quote} {name} {self._tail}"

    def _any(self) -> str:
        """Any value, in this form."""
        name = f"any_{self._index}"
        if not self._has_any:
            self._has_any = True
            key = r"/[^:,{}\[\]]+:/"
            string = self._string({})
            scalar = compact_json({"type": ["number", "boolean", "null"]})
            self.rules += [
                f'{name}: {string} | {scalar} | "[" ({name} ("," {name})*)? "]"'
                f' | "{{" ({key} {name} ("," {key} {name})*)? "}}"'
            ]
        return name
