"""Values that keep to a schema, in forms other than JSON: typed values, as Gemma 4 has them, and MiniMax M3's elements.

Typed values have strings between markers, bare keys and no space. Elements stand within elements, and a marker stands
before each tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza_common.call_formats.syntax import CallSyntax
from cadenza_common.grammar.schema_kinds import kinds_of, resolved
from gateway_svc.tools.lark import ANY_TEXT, MarkedText, compact_json, expression, literal
from gateway_svc.tools.xml_arguments import (
    NOTES,
    TREE_KEY,
    TYPED_KEY,
    argument_schema,
    constraining_keys,
    string_expressions,
    values_of,
)

_MAX_DEPTH = 16
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties", "$defs", "definitions"))
_OF_LISTS = frozenset(("items", "prefixItems", "minItems", "maxItems"))
_BARE_KEY = r"/[^:,{}\[\]]+:/"


class ValueRules:
    """Writes values of one tool; `rules` are those that they need. A reference is a rule, which may need itself."""

    def __init__(self, marked: MarkedText, mark: str, root: Mapping[str, Any], index: int) -> None:
        """mark: what ends each string."""
        self._mark_text, self._mark = mark, marked(mark)
        is_token = marked.begins_with_token(mark)
        self._last = "" if is_token else mark
        """What ends a string and is no token: it belongs to the string's greedy text."""
        self._tail = self._mark if is_token else ""
        self._root, self._index = root, index
        self._references: dict[str, str] = {}
        self.rules: list[str] = []

    def value(self, schema: Any, depth: int = 0) -> str:
        """A rule for a value; raises ValueError for a schema that it cannot keep to."""
        if isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference, depth)
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise ValueError("has a schema that allows nothing")
        if depth > _MAX_DEPTH:
            raise ValueError("is nested too deep")
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(options := schema.get(name), list) and (name != "allOf" or len(options) == 1):
                return f"({' | '.join(self.value(each, depth + 1) for each in options)})"
        if (values := values_of(schema)) is not None:
            return f"({' | '.join(self._exactly(each) for each in values)})"
        kinds = sorted(kinds_of(schema, self._root))
        return f"({' | '.join(self._of_kind(kind, schema, depth) for kind in kinds)})" if kinds else self._any()

    def _referred(self, reference: str, depth: int) -> str:
        if reference not in self._references:
            name = self._references[reference] = f"any_{self._index}_{len(self._references)}"
            rule = self.value(resolved({"$ref": reference}, self._root), depth + 1)
            self.rules.append(f"{name}: {rule}")
        return self._references[reference]

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            _check(schema, _OF_LISTS)
            first = schema.get("prefixItems", items if isinstance(items := schema.get("items"), list) else [])
            rest = schema.get("items", True)
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            if not first:
                return self._list(self._item(rest, depth + 1), least, most)
            if most is None or most > len(first):
                raise ValueError("has a schema with items behind those that it lists, to which its form cannot keep")
            return self._tuple([self._item(each, depth + 1) for each in first[:most]], least)
        if kind == "object":
            _check(schema, _OF_OBJECTS)
            return self._object(schema, schema.get("properties") or {}, schema.get("required") or (), depth)
        return self._scalar(compact_json(argument_schema({**schema, "type": kind}, self._root)))

    def _text(self, schema: Mapping[str, Any], prefix: str) -> str:
        """The name of a rule for a string, and what ends it where that is no token."""
        name = f"{prefix}_{self._index}_{len(self.rules)}"
        last = expression(self._last)
        parts = [f"/{each}{last}/" for each in string_expressions(schema) or [ANY_TEXT]]
        unwanted = f"~/{ANY_TEXT}{expression(self._mark_text)}{'(?s:.+)' if last else ANY_TEXT}/"
        self.rules.append(f"{name}: {' & '.join([*parts, unwanted])}")
        return f"{name} {self._tail}"

    def _exact_text(self, value: str) -> str:
        return f"{literal(value + self._last) if value + self._last else ''} {self._tail}"

    def _any(self) -> str:
        raise NotImplementedError

    def _exactly(self, value: Any) -> str:
        raise NotImplementedError

    def _string(self, schema: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def _scalar(self, rule: str) -> str:
        raise NotImplementedError

    def _item(self, schema: Any, depth: int) -> str:
        raise NotImplementedError

    def _list(self, item: str, least: int, most: int | None) -> str:
        raise NotImplementedError

    def _tuple(self, items: list[str], least: int) -> str:
        raise NotImplementedError

    def _object(self, schema: Mapping[str, Any], properties: Mapping[str, Any], required: Any, depth: int) -> str:
        raise NotImplementedError


class TypedRules(ValueRules):
    """Values as Gemma 4 writes them."""

    def __init__(self, way: CallSyntax, marked: MarkedText, root: Mapping[str, Any], index: int) -> None:
        super().__init__(marked, way.markers[-1], root, index)
        self._has_any = False

    def _exactly(self, value: Any) -> str:
        return f"{self._mark} {self._exact_text(value)}" if isinstance(value, str) else compact_json({"const": value})

    def _string(self, schema: Mapping[str, Any]) -> str:
        return f"{self._mark} {self._text(schema, 'STRING')}"

    def _scalar(self, rule: str) -> str:
        return rule

    def _item(self, schema: Any, depth: int) -> str:
        return self.value(schema, depth)

    def _list(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return '"[" "]"'
        more = "*" if least < 2 and most is None else f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'

    def _tuple(self, items: list[str], least: int) -> str:
        found = ""
        for place in reversed(range(len(items))):
            one = f"{items[place]} {found}" if place == 0 else f'"," {items[place]} {found}'
            found = one if place < least else f"({one})?"
        return f'"[" {found} "]"'

    def _object(self, schema: Mapping[str, Any], properties: Mapping[str, Any], required: Any, depth: int) -> str:
        if not properties:
            value = self.value(schema.get("additionalProperties") or True, depth + 1)
            return f'"{{" ({_BARE_KEY} {value} ("," {_BARE_KEY} {value})*)? "}}"'
        if any(TYPED_KEY.fullmatch(name) is None for name in properties):
            raise ValueError("has a name that its form cannot have")
        each = {name: f"{literal(name + ':')} {self.value(value, depth + 1)}" for name, value in properties.items()}
        optional, found = [name for name in properties if name not in required], ""
        if len(optional) == len(each):  # none is required: only a first part of them is written
            for name in reversed(optional):
                found = f'({each[name]} ("," {found})?)' if found else f"({each[name]})"
            return f'"{{" {found}? "}}"'
        always = ' "," '.join(each[name] for name in properties if name in required)
        others = " ".join(f'("," {each[name]})?' for name in optional)
        return f'"{{" {always} {others} "}}"'

    def _any(self) -> str:
        """Any value, in this form."""
        name = f"any_{self._index}"
        if not self._has_any:
            self._has_any = True
            string, scalar = self._string({}), compact_json({"type": ["number", "boolean", "null"]})
            self.rules += [
                f'{name}: {string} | {scalar} | "[" ({name} ("," {name})*)? "]"'
                f' | "{{" ({_BARE_KEY} {name} ("," {_BARE_KEY} {name})*)? "}}"'
            ]
        return name


class TreeRules(ValueRules):
    """Elements as MiniMax M3 writes them: a value is what is in one, with the marker behind it."""

    def __init__(self, way: CallSyntax, marked: MarkedText, root: Mapping[str, Any], index: int) -> None:
        super().__init__(marked, way.markers[0], root, index)

    def element(self, name: str, schema: Any, depth: int = 0) -> str:
        """A rule of an element; raises ValueError for a schema that it cannot keep to."""
        if TREE_KEY.fullmatch(name) is None:
            raise ValueError("has a name that its form cannot have")
        return f"{self._mark} {literal(f'<{name}>')} {self.value(schema, depth)} {literal(f'</{name}>')}"

    def _any(self) -> str:
        return self._string({})

    def _exactly(self, value: Any) -> str:
        return self._exact_text(value) if isinstance(value, str) else self._scalar(compact_json({"const": value}))

    def _string(self, schema: Mapping[str, Any]) -> str:
        return self._text(schema, "TEXT")

    def _scalar(self, rule: str) -> str:
        return f"{rule} {self._mark}"

    def _item(self, schema: Any, depth: int) -> str:
        return f"({self.element('item', schema, depth)})"

    def _list(self, item: str, least: int, most: int | None) -> str:
        count = "*+"[least] if least < 2 and most is None else f"{{{least},{'' if most is None else most}}}"
        return f"{item}{count} {self._mark}"

    def _tuple(self, items: list[str], least: int) -> str:
        found = ""
        for place in reversed(range(len(items))):
            found = f"{items[place]} {found}" if place < least else f"({items[place]} {found})?"
        return f"{found} {self._mark}"

    def _object(self, schema: Mapping[str, Any], properties: Mapping[str, Any], required: Any, depth: int) -> str:
        parts = [
            f"({self.element(name, each, depth + 1)}){'' if name in required else '?'}"
            for name, each in properties.items()
        ]
        return f"{' '.join(parts)} {self._mark}"


def _check(schema: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(constraining_keys(schema) - known - NOTES - {"type", "enum"}):
        raise ValueError(f"has a schema with {unknown[0]}, to which its form cannot keep")
