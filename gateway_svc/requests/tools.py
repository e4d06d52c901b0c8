"""The tools of a request, and which of them may or must be called, in the words of each API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway_svc.fields.field import check_keys, shown
from gateway_svc.fields.limits import MAX_TOOL_CHARS, MAX_TOOLS, check_entries
from gateway_svc.http.errors import ApiError, bad_request
from gateway_svc.requests.response_tools import custom_function, flat_tools, full_name, is_custom, prefix_of

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
Mode = Literal["none", "auto", "required"]
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_FLAT_KEYS = ("type", *_FUNCTION_KEYS)
_CUSTOM_KEYS = ("type", "name", "description", "input_schema", "strict")
_WITHOUT_EFFECT = ("cache_control", "eager_input_streaming")
"""Of a tool: prefixes are cached, and arguments streamed, by themselves."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"], []),
    "input_examples": ([],),
}
"""Of a tool: fields that nobody here can honour, and the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    """JSON schema of its arguments, an object; None: not given."""
    is_strict: bool = False
    """Whether its arguments must fit the schema."""
    namespace: str | None = None
    """Of /v1/responses: the group that it is in, with whose name its name begins."""
    custom: Mapping[str, Any] | None = None
    """Of /v1/responses: what was given, if its input is a free text."""

    @property
    def own_name(self) -> str:
        """Its name within its namespace."""
        return self.name.removeprefix(prefix_of(self.namespace)) if self.namespace else self.name

    def object(self) -> dict[str, Any]:
        """The tool in an answer of /v1/responses."""
        if self.custom is not None:
            return {**self.custom, "name": self.own_name}
        return {
            "type": "function",
            "name": self.own_name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.is_strict,
        }

    def chosen(self) -> dict[str, Any]:
        """The choice of it, there."""
        return {"type": "function" if self.custom is None else "custom", "name": self.own_name} | (
            {"namespace": self.namespace} if self.namespace else {}
        )

    def rendered(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how they are used."""

    tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    allowed: frozenset[str] | None = None
    """Names of the tools that the model may call; None: all."""
    is_parallel: bool = True
    """Whether there may be several calls in one answer."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def is_constrained(self) -> bool:
        """Whether calls must keep to a grammar."""
        return bool(self.callable) and (
            self.mode == "required" or self.allowed is not None or any(tool.is_strict for tool in self.callable)
        )

    def rendered(self) -> list[dict[str, Any]] | None:
        """The tools that the prompt shows: none if none may be called."""
        return None if self.mode == "none" or not self.tools else [tool.rendered() for tool in self.tools]

    def choice_object(self) -> Any:
        """tool_choice of an answer of /v1/responses."""
        if self.allowed is None:
            return self.mode if self.tools else "auto"
        tools = [tool.chosen() for tool in self.callable]
        if self.mode == "required" and len(tools) == 1:
            return tools[0]
        return {"type": "allowed_tools", "mode": self.mode, "tools": tools}

    def objects(self) -> list[dict[str, Any]]:
        """The tools in an answer of /v1/responses."""
        found: list[dict[str, Any]] = []
        for tool in self.tools:
            if tool.namespace is None:
                found.append(tool.object())
            elif found and found[-1]["type"] == "namespace" and found[-1]["name"] == tool.namespace:
                found[-1]["tools"].append(tool.object())
            else:
                found.append({"type": "namespace", "name": tool.namespace, "tools": [tool.object()]})
        return found

    def index_of(self, tool: Tool) -> int:
        """Its index in the request."""
        return self.tools.index(tool)


def chat_tools(values: Mapping[str, Any]) -> ToolUse:
    """Read the tools of a chat; raises ApiError."""
    return _use(_tools(values.get("tools"), _inner_function), values, _chosen_inner)


def response_tools(values: Mapping[str, Any]) -> ToolUse:
    """Read the tools of /v1/responses, where a function is flat; raises ApiError."""
    given = values.get("tools") or []
    check_entries("tools", given, MAX_TOOLS)
    return _use(_checked([_flat_tool(*each) for each in flat_tools(given)]), values, _chosen_flat)


def message_tools(values: Mapping[str, Any]) -> ToolUse:
    """Read the tools of a request of Anthropic's API; raises ApiError."""
    tools = _tools(values.get("tools"), _custom, schema="input_schema")
    choice = values.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise bad_request(f"tool_choice.type must be auto, any, tool or none, not {shown(kind)}", "tool_choice")
    known = ("type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else []))
    check_keys("tool_choice", choice, known, "tool_choice")
    is_single = choice.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        message = f"tool_choice.disable_parallel_tool_use must be a boolean, not {shown(is_single)}"
        raise bad_request(message, "tool_choice")
    if kind == "none" or not tools:
        _require_tools(tools, kind in ("any", "tool"))
        return ToolUse(tools)
    if kind == "tool":
        return ToolUse(tools, "required", _allowed(tools, [choice.get("name")]), is_parallel=False)
    return ToolUse(tools, "required" if kind == "any" else "auto", None, not is_single)


def _use(tools: tuple[Tool, ...], values: Mapping[str, Any], name_of: Callable[[Any, str], Any]) -> ToolUse:
    choice = values.get("tool_choice")
    is_parallel = values.get("parallel_tool_calls", True)
    mode: Any = choice if isinstance(choice, str) else "auto"
    allowed: frozenset[str] | None = None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        mode, listed = _allowed_tools(choice)
        names = [name_of(each, f"tool_choice.tools[{index}]") for index, each in enumerate(listed)]
        allowed = _allowed(tools, names)
    elif isinstance(choice, Mapping):
        mode, allowed = "required", _allowed(tools, [name_of(choice, "tool_choice")])
        is_parallel = False  # this tool, once
    if mode not in ("none", "auto", "required"):
        raise bad_request(f"tool_choice must be none, auto, required or a tool, not {shown(mode)}", "tool_choice")
    _require_tools(tools, mode == "required")
    return ToolUse(tools, mode if tools else "none", allowed, is_parallel)


def _require_tools(tools: Sequence[Tool], is_required: bool) -> None:
    if is_required and not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")


def _allowed_tools(choice: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The mode and the tools of a choice of some: in an object of their own in chats, beside the type in responses."""
    inner = choice.get("allowed_tools")
    if inner is not None:
        check_keys("tool_choice", choice, ("type", "allowed_tools"), "tool_choice")
        if not isinstance(inner, Mapping):
            raise bad_request(f"tool_choice.allowed_tools must be an object, not {shown(inner)}", "tool_choice")
        check_keys("tool_choice.allowed_tools", inner, ("mode", "tools"), "tool_choice")
    else:
        inner = choice
        check_keys("tool_choice", choice, ("type", "mode", "tools"), "tool_choice")
    tools = inner.get("tools")
    if not isinstance(tools, list) or not tools:
        raise bad_request("tool_choice.tools must be a list of tools", "tool_choice")
    return inner.get("mode", "auto"), tools


def _chosen_inner(choice: Any, where: str) -> Any:
    """The name of the function that a choice of chats means."""
    _check_function(choice, where, ("type", "function"))
    function = choice.get("function")
    if not isinstance(function, Mapping):
        raise bad_request(f"{where} must have a function with a name, not {shown(function)}", "tool_choice")
    check_keys(f"{where}.function", function, ("name",), "tool_choice")
    return function.get("name")


def _chosen_flat(choice: Any, where: str) -> Any:
    """The same of responses."""
    if is_custom(choice):
        _check_keys(choice, where, ("type", "name", "namespace"))
    else:
        _check_function(choice, where, ("type", "name", "namespace"))
    return full_name(choice.get("name"), choice.get("namespace"))


def _allowed(tools: Sequence[Tool], names: Sequence[Any]) -> frozenset[str]:
    known = {tool.name for tool in tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise bad_request(f"tool_choice names {shown(name)}, which is not in tools", "tool_choice")
    return frozenset(names)


def _tools(value: Any, function_of: Callable[[Any, str], Any], schema: str = "parameters") -> tuple[Tool, ...]:
    if not value:
        return ()
    check_entries("tools", value, MAX_TOOLS)
    return _checked(
        [_tool(function_of(each, f"tools[{index}]"), f"tools[{index}]", schema) for index, each in enumerate(value)]
    )


def _checked(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Tools that fit together; raises ApiError."""
    check_entries("tools", tools, MAX_TOOLS)
    if len(json.dumps([tool.rendered() for tool in tools], ensure_ascii=False)) > MAX_TOOL_CHARS:
        raise bad_request(f"tools have over {MAX_TOOL_CHARS} characters in all", "tools")
    names = set[str]()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise _wrong(f"tools[{index}]", f"has the name {tool.name} of another one")
        names.add(tool.name)
    return tuple(tools)


def _tool(function: Any, where: str, schema: str) -> Tool:
    if not isinstance(function, Mapping):
        raise _wrong(where, f"must have a function, not {shown(function)}")
    name, description, parameters = (function.get(each) for each in ("name", "description", schema))
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise _wrong(where, f"must have a name of 1 to 128 letters, digits and _.:/-, not {shown(name)}")
    if description is not None and not isinstance(description, str):
        raise _wrong(where, f"must have a string as description, not {shown(description)}")
    if parameters is not None and not isinstance(parameters, dict):
        raise _wrong(where, f"must have a JSON schema as {schema}, not {shown(parameters)}")
    if parameters and parameters.get("type", "object") != "object":
        raise _wrong(where, f"must have a schema of type object as {schema}, not of {shown(parameters['type'])}")
    _check_lists(parameters or {}, f"{where}.{schema}")
    try:
        json.dumps([description, parameters], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _wrong(where, f"cannot be written as JSON: {error}") from None
    is_strict = function.get("strict")
    if is_strict is not None and not isinstance(is_strict, bool):
        raise _wrong(where, f"must have a boolean as strict, not {shown(is_strict)}")
    return Tool(name, description, parameters, bool(is_strict))


def _check_lists(schema: Mapping[str, Any], where: str) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise _wrong(where, f"must have an object as properties, not {shown(properties)}")
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise _wrong(where, f"must have a list of strings as required, not {shown(required)}")


def _check_function(value: Any, where: str, keys: Sequence[str]) -> Mapping[str, Any]:
    """An object of type function with these keys."""
    kind = value.get("type", "function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind != "function":
        raise _wrong(where, f"must be of type function, not {shown(value if kind is None else kind)}")
    _check_keys(value, where, keys)
    return value


def _inner_function(value: Any, where: str) -> Any:
    """The function of a chat's tool."""
    function = _check_function(value, where, ("type", "function")).get("function")
    if isinstance(function, Mapping):
        _check_keys(function, f"{where}.function", _FUNCTION_KEYS)
    return function


def _flat_tool(value: Any, where: str, namespace: str | None) -> Tool:
    """The tool of a response."""
    if is_custom(value):
        _check_neutral(value, where)
        return replace(_tool(custom_function(value, where), where, "parameters"), namespace=namespace, custom=value)
    kind = value.get("type", "function") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind != "function":
        known = "function or custom" if namespace else "function, custom or namespace"
        hint = "" if kind == "namespace" else ": no tools are called here, so the program must leave it out"
        raise _wrong(where, f"must be of type {known}, not {shown(kind)}{hint}")
    function = _check_function(value, where, _FLAT_KEYS)
    return replace(_tool(function, where, "parameters"), namespace=namespace)


def _custom(value: Any, where: str) -> Mapping[str, Any]:
    """A tool of Anthropic's API."""
    if not isinstance(value, Mapping) or value.get("type") not in (None, "custom"):
        kind = value.get("type") if isinstance(value, Mapping) else value
        raise _wrong(where, f"must be a tool of the caller's own, not {shown(kind)}")
    _check_keys(value, where, _CUSTOM_KEYS)
    return value


def _check_keys(value: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    _check_neutral(value, where)
    check_keys(where, value, (*known, *_WITHOUT_EFFECT, *_NEUTRAL), where.partition("[")[0].partition(".")[0])


def _check_neutral(value: Mapping[str, Any], where: str) -> None:
    for name, neutral in _NEUTRAL.items():
        given = value.get(name)
        if given is not None and not any(given == each and type(given) is type(each) for each in neutral):
            raise _wrong(where, f"has {name}, which is not supported: tools are shown to the model as they are")


def _wrong(where: str, why: str) -> ApiError:
    return bad_request(f"{where} {why}", where.partition("[")[0].partition(".")[0])
