"""Grammars of answers whose calls keep to the tools' schemas, in the format of the model.

Written in llguidance's Lark. Each tool's arguments are rules of their own, each in a line of its own: the line of an
error names the tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.http.errors import bad_request
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.parts import Marker, Role
from gateway_svc.parsing.python_call import KEY
from gateway_svc.parsing.qwen_coder import FUNCTION, FUNCTION_END
from gateway_svc.parsing.reasoning import Opening
from gateway_svc.requests.tools import Tool, ToolUse
from gateway_svc.tools.lark import ANY_TEXT, compact_json, literal
from gateway_svc.tools.xml_arguments import XML_KEY, any_arguments, argument_rules, argument_schema

_SPACE = r"SPACE: /\n{0,2}/"
"""Behind a thought, where models break the line."""
_KWARGS_KEYS = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$schema",
        "$defs",
        "definitions",
    )
)
"""What a schema of arguments may have that are written one by one."""
_COMMA = '", "'
_ANY = f"/{ANY_TEXT}/"


def grammar_of(use: ToolUse, formats: Formats, opening: Opening | None, answer: Mapping[str, Any] | None) -> str:
    """The grammar of an answer with these tools.

    opening: how the prompt ends; None: thoughts are not split off. answer: the JSON schema of content; None: any text.
    Raises ApiError for a tool that cannot be written in the format.
    """
    writer = _Writer(use, formats)
    if use.mode == "required":
        start = writer.calls()
    else:
        start = writer.text_or_calls() if answer is None else f"{writer.calls()} | answer"
    rules = [f"start: {_thought(formats, opening)} ({start})", *writer.rules]
    if answer is not None:
        # Compact too: with other whitespace than calls it could not be an alternative to them.
        rules.append(f"answer: {compact_json(answer)}")
    return "\n".join(["%llguidance {}", *rules, *_terminals(formats, opening)])


def thought_then(formats: Formats, opening: Opening, answer: Sequence[str]) -> str:
    """The grammar of an answer behind a thought; answer: rules of which one is called so, perhaps behind a header."""
    has_header = answer[0].startswith("%llguidance")
    header, rules = (answer[0], answer[1:]) if has_header else ("%llguidance {}", answer)
    start = f"start: {_thought(formats, opening)} answer"
    return "\n".join([header, start, *rules, *_terminals(formats, opening)])


def tool_of_line(grammar: str, line: int) -> int | None:
    """The index of the tool whose arguments a line of a grammar describes, counted from 1."""
    lines = grammar.split("\n")
    found = re.match(r"(?:args|VALUE)_(\d+)", lines[line - 1]) if 0 < line <= len(lines) else None
    return None if found is None else int(found[1])


def _thought(formats: Formats, opening: Opening | None) -> str:
    if opening is None or opening.is_past:
        return ""
    if opening is Opening.OPEN or formats.always_thinks:
        return "thought SPACE"
    return f"({_mark(formats.marker(Role.THOUGHT))} thought SPACE)?"


def _terminals(formats: Formats, opening: Opening | None) -> list[str]:
    if opening is None or opening.is_past:
        return []
    end = formats.marker(Role.THOUGHT_END)
    if end.token_id is None:
        # Greedy text would take the marker's beginning, and then could not end with it.
        return [f"thought[lazy]: THOUGHT {literal(end.text)}", f"THOUGHT: /{ANY_TEXT}/", _SPACE]
    return [f"thought: THOUGHT {_mark(end)}", f"THOUGHT: {_text_without(end.text)}", _SPACE]


def _mark(marker: Marker) -> str:
    return f"<[{marker.token_id}]>" if marker.token_id is not None else literal(marker.text)


def _text_without(text: str) -> str:
    """Any text in which another one does not stand."""
    text = re.escape(text).replace("/", r"\/")
    return f"{_ANY} & ~/{ANY_TEXT}{text}{ANY_TEXT}/"


class _Writer:
    """Writes the calls of one request."""

    def __init__(self, use: ToolUse, formats: Formats) -> None:
        self._use = use
        self._formats = formats
        self.rules: list[str] = []
        for tool in use.callable:
            self.rules.append(self._call(tool, use.index_of(tool)))
        self.rules.append("call: " + " | ".join(f"call_{use.index_of(tool)}" for tool in use.callable))

    def calls(self) -> str:
        """One call or several, and nothing else."""
        match self._formats.tools:
            case "llama3_json":
                marker = self._formats.marker(Role.CALL)
                mark = "" if marker.token_id is None else f"({_mark(marker)})? "
                return mark + self._several("call", '"; "')
            case "pythonic":
                return f'"[" {self._several("call", _COMMA)} "]"'
            case "hermes" | "qwen3_coder":
                self._write_body()
                return self._several("open body", '"\\n"')
        self._write_body()
        return self._several("open body", "") if self._has_arguments_marker else "open body"

    def text_or_calls(self) -> str:
        """Free text, in which calls keep to the grammar."""
        if self._formats.tools in ("llama3_json", "pythonic"):
            calls = self.calls()
            first = "{" if self._formats.tools == "llama3_json" else r"\["
            self.rules.append(rf"TEXT: /(\s*[^\s{first}]{ANY_TEXT})?/")
            return f"TEXT | {calls}"
        self._write_body()
        marker = self._formats.marker(Role.CALL)
        # What calls without a marker too stands in no text: it would keep to no schema.
        free = [_text_without(FUNCTION)] if self._formats.tools == "qwen3_coder" else []
        if marker.token_id is None:
            self.rules += [f"before[lazy]: TEXT {literal(marker.text)}", f"TEXT: {' & '.join(free or [_ANY])}"]
        else:
            self.rules += ["before: TEXT open", f"TEXT: {' & '.join([_text_without(marker.text), *free])}"]
        return f"(before body){'*' if self._use.is_parallel else '?'} TEXT"

    def _several(self, one: str, between: str) -> str:
        return f"{one} ({between} {one})*" if self._use.is_parallel else one

    def _write_body(self) -> None:
        """What a marker begins."""
        if "body" in {rule.partition(":")[0] for rule in self.rules}:
            return
        self.rules.append(f"open: {_mark(self._formats.marker(Role.CALL))}")
        if self._formats.tools in ("hermes", "qwen3_coder"):
            self.rules.append(f'body: "\\n" call "\\n" {_mark(self._formats.marker(Role.CALL_END))}')
        elif self._has_arguments_marker:
            self.rules.append("body: call")
        else:
            self.rules.append(f'body: "[" {self._several("call", _COMMA)} "]"')

    @property
    def _has_arguments_marker(self) -> bool:
        return self._formats.tools == "mistral" and self._formats.marker(Role.ARGUMENTS).token_id is not None

    def _call(self, tool: Tool, index: int) -> str:
        """The rules of one tool's call."""
        schema = self._schema(tool)
        if self._formats.tools == "pythonic":
            return self._python_call(tool, index, schema)
        if self._formats.tools == "qwen3_coder":
            return self._xml_call(tool, index, schema)
        self.rules.append(f"args_{index}: {compact_json(schema)}")
        if self._has_arguments_marker:
            return f"call_{index}: {literal(tool.name)} {_mark(self._formats.marker(Role.ARGUMENTS))} args_{index}"
        key = "parameters" if self._formats.tools == "llama3_json" else "arguments"
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        return f'call_{index}: {literal(head)} args_{index} "}}"'

    def _schema(self, tool: Tool) -> dict[str, Any]:
        """What its arguments must be; any object where nothing is to be checked."""
        if tool.parameters is None or not (self._use.mode == "required" or tool.is_strict):
            known = (tool.parameters or {}).get("properties") if self._formats.tools == "pythonic" else None
            return {"type": "object", "properties": dict.fromkeys(known, True)} if known else {"type": "object"}
        return {"type": "object", **tool.parameters}

    def _python_call(self, tool: Tool, index: int, schema: Mapping[str, Any]) -> str:
        """name(key=value, …): the properties in their order, those that are not required may be left out."""
        properties, required = _arguments_of(schema, f"tools[{index}]", KEY)
        for place, (name, value) in enumerate(properties.items()):
            value = value if isinstance(value, dict) else {} if value is True else {"not": {}}
            own = compact_json(argument_schema(value, schema))
            self.rules.append(f"args_{index}_{place}: {literal(name + '=')} {own}")
        return f'call_{index}: {literal(tool.name + "(")} {_arguments(index, list(properties), set(required))} ")"'

    def _xml_call(self, tool: Tool, index: int, schema: Mapping[str, Any]) -> str:
        """A tag for each argument, in the order of the properties; any ones where the schema names none."""
        head, tail = f"{FUNCTION}{tool.name}>\n", FUNCTION_END
        if "properties" not in schema:
            self.rules += any_arguments(index)
            return f"call_{index}: {literal(head)} args_{index}* {literal(tail)}"
        where = f"tools[{index}]"
        properties, required = _arguments_of(schema, where, XML_KEY)
        for place, (name, value) in enumerate(properties.items()):
            try:
                self.rules += argument_rules(f"{index}_{place}", name, value, schema)
            except ValueError as error:
                raise bad_request(f"{where}: the argument {name!a:.64} {error}", "tools") from None
        rest = [f"args_{index}_{place}" + ("" if name in required else "?") for place, name in enumerate(properties)]
        return f"call_{index}: {literal(head)} {' '.join(rest)} {literal(tail)}"


def _arguments_of(
    schema: Mapping[str, Any], where: str, key: re.Pattern[str]
) -> tuple[Mapping[str, Any], Sequence[str]]:
    """The properties of a schema and which of them are required, for formats that write each by itself."""
    unknown = sorted(set(schema) - _KWARGS_KEYS)
    if unknown:
        raise bad_request(f"{where}: a call in the model's form cannot keep to {unknown[0][:64]}", "tools")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    for name in [*properties, *required]:
        if not isinstance(name, str) or key.fullmatch(name) is None or name not in properties:
            raise bad_request(f"{where}: a call in the model's form cannot have the argument {name!a:.64}", "tools")
    return properties, required


def _arguments(index: int, names: Sequence[str], required: set[str]) -> str:
    """A rule for the arguments: the required ones, any of the others, and commas between them."""
    rest = [f"args_{index}_{place}" for place in range(len(names))]
    first = next((place for place, name in enumerate(names) if name in required), None)
    if first is not None:  # commas belong to what stands before and behind it
        before = [f'({rest[place]} ", ")?' for place in range(first)]
        behind = [_with_comma(rest[place], names[place] in required) for place in range(first + 1, len(names))]
        return " ".join([*before, rest[first], *behind])
    options = [
        " ".join([rest[place], *(_with_comma(each, is_required=False) for each in rest[place + 1 :])])
        for place in range(len(names))
    ]
    return f"({' | '.join(options)})?" if options else ""


def _with_comma(rule: str, is_required: bool) -> str:
    return f'", " {rule}' if is_required else f'(", " {rule})?'
