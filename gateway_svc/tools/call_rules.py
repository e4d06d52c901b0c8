"""The rules of one tool's call, in the way of the model: its name, and arguments that keep to the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from cadenza_common.call_formats.syntax import Body, CallSyntax
from cadenza_common.grammar.closing import closed
from cadenza_common.grammar.readable import readable
from gateway_svc.http.errors import bad_request
from gateway_svc.parsing.python_call import KEY
from gateway_svc.requests.tools import Tool
from gateway_svc.tools.lark import MarkedText, compact_json, literal
from gateway_svc.tools.object_schemas import CHOICES, UNWRITTEN, ObjectSchema, flat, object_variants
from gateway_svc.tools.value_rules import TreeRules, TypedRules
from gateway_svc.tools.xml_arguments import TAG_KEY, TREE_KEY, TYPED_KEY, TagRules, argument_schema


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
        known = readable(parameters)
        return {"type": "object", **closed(flat(known) if known.keys() & UNWRITTEN else known)}

    def _variants(self, key: re.Pattern[str]) -> list[ObjectSchema]:
        """The properties of the schema and which of them are required, in each of its choices; raises ApiError."""
        parameters = self._tool.parameters or {}
        if not self._must_fit:
            given = parameters.get("properties")
            return [ObjectSchema({name: True for name in given or {} if key.fullmatch(name)}, frozenset())]
        try:
            found = object_variants(parameters, parameters)
        except ValueError as error:
            raise bad_request(f"{self._where}: a call in the model's form cannot keep to {error}", "tools") from None
        for name in (name for each in found for name in (*each.properties, *each.required)):
            if key.fullmatch(name) is None or any(
                name not in each.properties for each in found if name in each.required
            ):
                message = f"{self._where}: a call in the model's form cannot have the argument {name!a:.64}"
                raise bad_request(message, "tools")
        return found

    def _alternatives(
        self,
        key: re.Pattern[str],
        write: Callable[[str, str, Any], list[str]],
        join: Callable[[ObjectSchema, str], str],
    ) -> list[str]:
        """The rules of all choices; write: those of an argument, by its rule's number, name and schema."""
        rules, calls = [], []
        for number, each in enumerate(self._variants(key)):
            prefix = f"{self._index}_{number}" if number else str(self._index)
            for place, (name, schema) in enumerate(each.properties.items()):
                try:
                    rules += write(f"{prefix}_{place}", name, schema)
                except ValueError as error:
                    raise bad_request(f"{self._where}: the argument {name!a:.64} {error}", "tools") from None
            calls.append(join(each, prefix))
        return [*rules, f"args_{self._index}: {' | '.join(calls)}"]

    def _tags(self) -> list[str]:
        """A tag for each argument, in the order of the properties; any ones where the schema names none."""
        assert self._way.tags is not None
        tags, end = TagRules(self._way.tags, self._marked), self._way.tags.end
        root = self._tool.parameters or {}
        if not self._must_fit or ("properties" not in root and not root.keys() & CHOICES):
            return [*tags.any_arguments(self._index), self._call(f"args_{self._index}*", end)]
        arguments = self._alternatives(
            TAG_KEY, lambda number, name, value: tags.argument(number, name, value, root), _one_by_one
        )
        return [*arguments, self._call(f"args_{self._index}", end)]

    def _python(self) -> list[str]:
        """name(key=value, …): the properties in their order, those that are not required may be left out."""
        root = self._tool.parameters or {}

        def write(number: str, name: str, value: Any) -> list[str]:
            value = value if isinstance(value, dict) else {} if value is True else {"not": {}}
            return [f"args_{number}: {literal(name + '=')} {compact_json(argument_schema(value, root))}"]

        return [*self._alternatives(KEY, write, comma_separated), self._call(f"args_{self._index}", ")")]

    def _tree(self) -> list[str]:
        """An element for each argument, in the order of the properties."""
        tree = TreeRules(self._way, self._marked, self._tool.parameters or {}, self._index)
        rules = self._alternatives(
            TREE_KEY, lambda number, name, value: [f"args_{number}: {tree.element(name, value)}"], _one_by_one
        )
        return [*tree.rules, *rules, self._call(f"args_{self._index}")]

    def _typed(self) -> list[str]:
        """name{key:value,…}, with values in the format's own form."""
        typed = TypedRules(self._way, self._marked, self._tool.parameters or {}, self._index)
        rules = self._alternatives(
            TYPED_KEY,
            lambda number, name, value: [f"args_{number}: {literal(name + ':')} {typed.value(value)}"],
            lambda each, prefix: comma_separated(each, prefix, ","),
        )
        return [*rules, *typed.rules, self._call(f"args_{self._index}", "}")]


def _one_by_one(schema: ObjectSchema, prefix: str) -> str:
    return " ".join(
        f"args_{prefix}_{place}" + ("" if name in schema.required else "?")
        for place, name in enumerate(schema.properties)
    )


def comma_separated(schema: ObjectSchema, prefix: str, comma: str = ", ") -> str:
    """A rule for the arguments: the required ones, any of the others, and commas between them."""
    names, required = list(schema.properties), schema.required
    rest = [f"args_{prefix}_{place}" for place in range(len(names))]
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
