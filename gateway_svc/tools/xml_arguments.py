"""Arguments that are bare text between tags, as Qwen3-Coder writes them: their types, and rules of grammars."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.parsing.argument_kinds import TEXT, Kinds, kinds_of, resolved
from gateway_svc.parsing.qwen_coder import PARAMETER, PARAMETER_END
from gateway_svc.requests.tools import Tool
from gateway_svc.tools.argument_schemas import argument_schema
from gateway_svc.tools.lark import ANY_TEXT, compact_json, literal

XML_KEY = re.compile(r"[^\s<>]{1,128}")
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
"""Keys of a schema that allow all."""
_SIZES = frozenset(("minLength", "maxLength"))
_LAST = f"\n{PARAMETER_END}\n"
_END = PARAMETER_END.replace("/", r"\/")
_ONE_END = rf"& ~/{ANY_TEXT}{_END}(?s:.+)/"
"""The first closing tag is the last one."""


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
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"{{{least},{most}}}"


def _is_free(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a schema allows all values of its types."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or schema.keys() - _NOTES - {"type", "anyOf", "oneOf"}:
        return schema is True
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return all(_is_free(each, root) for each in options)
