"""JSON schemas in words that llguidance reads, where it does not read theirs.

A rewritten schema accepts a subset of what the original accepts. The two are equal, except for `oneOf`: its options
become `anyOf` only if they are mutually exclusive, and a discriminator property (as pydantic and OpenAPI call it) is
then required.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cadenza_common.grammar.closing import CHOICES, NAMED_SCHEMAS
from cadenza_common.grammar.schema_kinds import kinds_of, resolved

_FORMATS = frozenset("date date-time duration email hostname ipv4 ipv6 time unknown uri uuid".split())
"""What llguidance checks. All others say nothing: in JSON schema a format is a note, which one need not know."""
_OF_SCHEMAS = (*CHOICES, "prefixItems")
_SCHEMAS = frozenset(("additionalProperties", "items", "propertyNames"))
_NAME_NOTES = frozenset(("type", "format", "title", "description", "$comment"))
_MAX_DEPTH = 64
_MAX_OPTIONS = 128


def readable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as llguidance reads it; what cannot be said otherwise stays as it is."""
    return _Rewriter(schema).whole()


class _Rewriter:
    """Rewrites one schema, with its definitions."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._discriminated: dict[tuple[str, str], str] = {}
        """The definition that requires a property, by the reference to the one that does not, and the property."""
        self._added: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        found = self._schema(self._root, 0)
        assert isinstance(found, dict)
        return {**found, "$defs": {**found.get("$defs", {}), **self._added}} if self._added else found

    def _schema(self, value: Any, depth: int) -> Any:
        if not isinstance(value, Mapping) or depth > _MAX_DEPTH:
            return value
        unwanted = value.get("not")
        if depth and (unwanted is True or unwanted == {}):
            return False
        found = {name: self._inner(name, each, depth + 1) for name, each in value.items()}
        if isinstance(given := found.get("format"), str) and given not in _FORMATS:
            del found["format"]
        if "propertyNames" in found:
            found = _with_names(found)
        if isinstance(found.get("oneOf"), list) and "anyOf" not in found:
            options = self._any_of(found["oneOf"])
            if options is not None:
                del found["oneOf"]
                found["anyOf"] = options
        return found

    def _inner(self, name: str, value: Any, depth: int) -> Any:
        if name in _SCHEMAS and isinstance(value, Mapping):
            return self._schema(value, depth)
        if name in NAMED_SCHEMAS and isinstance(value, Mapping):
            return {key: self._schema(each, depth) for key, each in value.items()}
        if (name in _OF_SCHEMAS or name == "items") and isinstance(value, list):
            return [self._schema(each, depth) for each in value]
        return value

    def _any_of(self, options: list[Any]) -> list[Any] | None:
        """Mutually exclusive options; None: they may overlap."""
        if len(options) > _MAX_OPTIONS:
            return None
        kinds = [kinds_of(each, self._root) for each in options]
        values = [_values(resolved(each, self._root)) for each in options]
        objects = [place for place, kind in enumerate(kinds) if kind == {"object"} and values[place] is None]
        others = [place for place in range(len(options)) if place not in objects]
        for place, one in enumerate(others):
            for other in (*others[:place], *objects[:1]):
                are_apart = kinds[one] and kinds[other] and _is_disjoint(*kinds[one], *kinds[other])
                if not are_apart and not _are_disjoint([values[one], values[other]]):
                    return None
        if len(objects) < 2:
            return options
        of_objects = [options[place] for place in objects]
        key = next((name for name in self._names(of_objects[0]) if self._discriminates(name, of_objects)), None)
        if key is None:
            return None
        return [self._requiring(key, each) if place in objects else each for place, each in enumerate(options)]

    def _names(self, option: Any) -> list[str]:
        return list(dict.fromkeys(name for each in self._parts(option) for name in _named(each)))

    def _parts(self, option: Any) -> list[Mapping[str, Any]]:
        """The schemas that all hold for an object."""
        found: dict[int, Mapping[str, Any]] = {}
        rest = [option]
        while rest:
            part = resolved(rest.pop(0), self._root)
            if isinstance(part, Mapping) and id(part) not in found:
                found[id(part)] = part
                rest += _listed(part.get("allOf"))
        return [*found.values()]

    def _discriminates(self, name: str, options: list[Any]) -> bool:
        return _are_disjoint(self._values_of(name, each, set()) for each in options)

    def _values_of(self, name: str, option: Any, seen: set[int]) -> set[str] | None:
        """The values, as JSON, that a property of an object may have; None: they are not named."""
        for part in self._parts(option):
            if id(part) in seen:
                return None
            seen.add(id(part))
            if name in _named(part):
                for each in self._parts(_named(part)[name]):
                    if (found := _values(each)) is not None:
                        return found
            for key in ("oneOf", "anyOf"):
                sets = [self._values_of(name, each, seen) for each in _listed(part.get(key))]
                if sets and None not in sets:
                    return {value for each in sets for value in (each or ())}
        return None

    def _requiring(self, name: str, option: Any) -> Any:
        """An object that has a property. That of a reference is a definition of its own: it may refer to itself."""
        if any(name in _required(each) for each in self._parts(option)):
            return option
        reference = option.get("$ref")
        if not isinstance(reference, str):
            return {**option, "required": [*_required(option), name]}
        key = (reference, name)
        if key not in self._discriminated:
            title = self._discriminated[key] = f"cadenza-{len(self._discriminated)}"
            whole = resolved(option, self._root)
            self._added[title] = self._schema({**whole, "required": [*_required(whole), name]}, 1)
        return {"$ref": f"#/$defs/{self._discriminated[key]}"}


def _with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """An object's schema without propertyNames, where properties and patterns can say it."""
    names: Any = schema["propertyNames"]
    rest = {name: each for name, each in schema.items() if name != "propertyNames"}
    names = {} if names is True else names
    if isinstance(names, Mapping) and names.get("type", "string") == "string":
        keys = names.keys() - _NAME_NOTES
        if not keys:
            return rest
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
        if "patternProperties" in schema or not isinstance(properties, Mapping):
            return schema
        if keys in ({"enum"}, {"const"}) and isinstance(texts := names.get("enum", [names.get("const")]), list):
            known = {name: each for name, each in properties.items() if name in texts}
            more = {name: others for name in texts if isinstance(name, str) and name not in known}
            return {**rest, "properties": {**known, **more}, "additionalProperties": False}
        if keys <= {"pattern", "minLength", "maxLength"} and not properties and (text := _pattern(names)) is not None:
            return {**rest, "patternProperties": {text: others}, "additionalProperties": False}
    return schema


def _pattern(names: Mapping[str, Any]) -> str | None:
    """An expression of names; None for one and a length beside it."""
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if "pattern" not in names:
        return rf"^[\s\S]{{{least},{most}}}$"
    return str(names["pattern"]) if (least, most) == (0, "") else None


def _values(schema: Any) -> set[str] | None:
    """The values that a schema names, as JSON; None: it names none."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(_whole(each), sort_keys=True) for each in values} if isinstance(values, list) else None


def _whole(value: Any) -> Any:
    """A value with 3 for 3.0, which it equals."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _named(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("required")
    return found if isinstance(found, list) else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_disjoint(*kinds: str) -> bool:
    """Whether each comes once; whole numbers are numbers."""
    return len(kinds) == len(set(kinds)) and not {"integer", "number"} <= set(kinds)


def _are_disjoint(sets: Iterable[set[str] | None]) -> bool:
    """Whether no value is in two; None: all values. Looks no further than it must."""
    known: set[str] = set()
    for each in sets:
        if each is None or known & each:
            return False
        known |= each
    return True
