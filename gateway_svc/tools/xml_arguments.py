"""Arguments that a format writes each by itself: the schema of each, and of bare text between tags types and rules.

Qwen3-Coder writes arguments as bare text between tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.fields.field import as_integers
from gateway_svc.parsing.argument_kinds import TEXT, Kinds, kinds_of, resolved
from gateway_svc.parsing.qwen_coder import PARAMETER, PARAMETER_END
from gateway_svc.requests.tools import Tool
from gateway_svc.tools.lark import ANY_TEXT, compact_json, literal

XML_KEY = re.compile(r"[^\s<>]{1,128}")
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
"""Keys of a schema that allow all."""
_SIZES = frozenset(("minLength", "maxLength"))
_LAST = f"\n{PARAMETER_END}\n"
_END = PARAMETER_END.replace("/", r"\/")
_ONE_END = rf"& ~/{ANY_TEXT}{_END}(?s:.+)/"
"""The first closing tag is the last one."""
_SHARED = ("$defs", "definitions")
_WHOLE = "cadenza-whole"
"""The name, among an argument's definitions, of the schema that it is taken from."""
_MAX_DEPTH = 64
"""Schemas that are nested deeper are refused where they are rendered."""


def argument_kinds(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Kinds]]:
    """What the arguments of tools may be."""
    return {
        tool.name: {
            name: kinds_of(schema, tool.parameters)
            for name, schema in (tool.parameters.get("properties") or {}).items()
        }
        for tool in tools
        if tool.parameters is not None
    }


def any_arguments(index: int) -> list[str]:
    """Rules of one argument of a tool whose arguments are free."""
    return [
        f'args_{index}: {literal(PARAMETER)} NAME_{index} ">\\n" VALUE_{index} "\\n"',
        rf"NAME_{index}: /[^\s<>]+/",
        f"VALUE_{index}: /{ANY_TEXT}{_END}/ {_ONE_END}",
    ]


def argument_rules(number: str, name: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Rules of the argument args_NUMBER; raises ValueError for one whose schema bare text cannot keep to."""
    tag = f"{PARAMETER}{name}>\n"
    head = f"args_{number}: {literal(tag)} "
    schema = resolved(schema, root)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ValueError("has a schema that allows nothing")
    kinds = kinds_of(schema, root)
    if kinds and "string" not in kinds:
        return [f"{head}{compact_json(argument_schema(schema, root))} {literal(_LAST)}"]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if kinds == TEXT and values is not None:
        return [head + _one_of(values)]
    size = _size(schema) if kinds == TEXT else ""
    if not size and not _is_free(schema, root):
        raise ValueError("has a schema that bare text cannot keep to")
    text = f"/(?s:.{size or '*'})\\n{_END}/ {_ONE_END}"
    return [f'{head}VALUE_{number} "\\n"', f"VALUE_{number}: {text}"]


def _one_of(values: Any) -> str:
    if not isinstance(values, list) or any(not isinstance(each, str) or PARAMETER_END in each for each in values):
        raise ValueError("has values that bare text cannot be")
    return f"({' | '.join(literal(each + _LAST) for each in values)})"


def _size(schema: Mapping[str, Any]) -> str:
    """The length of a string, as an expression repeats what it is of; nothing: any, or other constraints."""
    if not schema.keys() & _SIZES or schema.keys() - _NOTES - _SIZES - {"type"}:
        return ""
    least, most = as_integers(schema.get("minLength", 0)), as_integers(schema.get("maxLength", ""))
    return f"{{{least},{most}}}"


def _is_free(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a schema allows all values of its types."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or schema.keys() - _NOTES - {"type", "anyOf", "oneOf"}:
        return schema is True
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return all(_is_free(each, root) for each in options)


def argument_schema(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one argument as a document; whole: the schema of all arguments, to which references point."""
    found: dict[str, Any] = _moved(dict(schema))
    found |= {name: _moved(whole[name]) for name in _SHARED if name in whole}
    if _refers(found):
        others = {name: _moved(value) for name, value in whole.items() if name not in _SHARED}
        found["$defs"] = {**found.get("$defs", {}), _WHOLE: others}
    return found


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
