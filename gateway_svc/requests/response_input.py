"""Input of /v1/responses as a chat.

`encrypted_content` of reasoning items: the thought itself, for clients that send back nothing else of it.

Nothing is kept here between requests, so what a client is to bring back must be in its hands. OpenAI's is encrypted, as
its thoughts are hidden; here they stand beside it in clear, and the string is only opaque.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from cadenza.chats import kind_of_part, text_of_part
from cadenza.prompts import Prompt
from gateway_svc.fields.field import check_keys, shown
from gateway_svc.fields.limits import MAX_TURNS, check_entries
from gateway_svc.http.errors import ApiError, bad_request
from gateway_svc.requests.prompts import chat_prompt, template_arguments
from gateway_svc.requests.response_tools import INPUT, arguments_of, full_name
from gateway_svc.requests.tools import ToolUse

_TEXT_PARTS = ("input_text", "output_text", "text")
_KEYS = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "id", "call_id", "name", "namespace", "arguments", "status"),
    "custom_tool_call": ("type", "id", "call_id", "name", "namespace", "input", "status"),
    "function_call_output": ("type", "id", "call_id", "output", "status"),
    "custom_tool_call_output": ("type", "id", "call_id", "name", "output", "status"),
    "reasoning": ("type", "id", "summary", "content", "status", "encrypted_content"),
}
"""By the type of an item: its fields."""
_MARK = "cadenza:"


def response_prompt(values: Mapping[str, Any], use: ToolUse) -> Prompt:
    """The prompt of a request; raises ApiError."""
    given = values["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    check_entries("input", items, MAX_TURNS)
    chat = _TurnBuilder()
    if "instructions" in values:
        chat.messages.append({"role": "system", "content": values["instructions"]})
    for index, item in enumerate(items):
        chat.add(item, f"input[{index}]")
    effort = values.get("reasoning", {}).get("effort")
    arguments = template_arguments(values.get("chat_template_kwargs", {}), effort)
    try:
        return chat_prompt(chat.messages, use, arguments=arguments, cache_salt=values.get("cache_salt"))
    except ApiError as error:
        if error.param != "messages":
            raise
        raise bad_request(error.message.replace("messages", "input", 1), "input") from None


class _TurnBuilder:
    """Makes messages of items: a thought, a text and calls that follow each other are one turn of the assistant."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._is_turn = False
        """Whether the last message is a turn that goes on."""

    def add(self, item: Any, where: str) -> None:
        """Add an item; raises ApiError."""
        if not isinstance(item, Mapping):
            raise bad_request(f"{where} must be an object, not {shown(item)}", "input")
        kind = item.get("type", "message")
        keys = _KEYS.get(kind) if isinstance(kind, str) else None
        if keys is None:
            raise bad_request(f"{where} is of type {shown(kind)}; {', '.join(_KEYS)} are supported", "input")
        check_keys(where, item, keys, "input")
        match kind:
            case "message":
                self._message(item, where)
            case "function_call" | "custom_tool_call":
                self._call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                output = _content(item.get("output"), where)
                self.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
                self._is_turn = False
            case _:
                self._thought(item, where)

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        content = _content(item.get("content"), where)
        if item.get("role") == "assistant":
            turn = self._turn()
            if turn["content"] is not None or "tool_calls" in turn:
                turn = self._turn(is_new=True)
            turn["content"] = content
        else:
            self.messages.append({"role": item.get("role"), "content": content})
            self._is_turn = False

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        key = INPUT if item["type"] == "custom_tool_call" else "arguments"
        name, arguments, namespace = item.get("name"), item.get(key), item.get("namespace")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise bad_request(f"{where} must have name and {key} as strings", "input")
        if namespace is not None and not isinstance(namespace, str):
            raise bad_request(f"{where}.namespace must be a string, not {shown(namespace)}", "input")
        name = full_name(name, namespace or None)
        if key == INPUT:
            arguments = arguments_of(arguments)
        call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _thought(self, item: Mapping[str, Any], where: str) -> None:
        sealed = item.get("encrypted_content")
        thought = None if sealed is None else brought_back(sealed)
        if sealed is not None and thought is None:
            raise bad_request(f"{where}.encrypted_content is not of this server, and cannot be read", "input")
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
        ):
            raise bad_request(f"{where} must have text parts", "input")
        text = "".join(part["text"] for part in parts) if thought is None else thought
        turn = self._turn(is_new=self._is_turn and self.messages[-1]["content"] is not None)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _turn(self, *, is_new: bool = False) -> dict[str, Any]:
        """The turn of the assistant that goes on, or a new one."""
        if is_new or not self._is_turn:
            self.messages.append({"role": "assistant", "content": None})
            self._is_turn = True
        return self.messages[-1]


def _content(content: Any, where: str) -> Any:
    return [_part(part, where) for part in content] if isinstance(content, list) else content


def _part(part: Any, where: str) -> Any:
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(part, Mapping) and part.get("type") == "refusal" and text_of_part(part) is not None:
        return part
    raise bad_request(f"{where}: only text parts are supported, not {kind_of_part(part) or shown(part)}", "input")


def carried(thought: str) -> str:
    """The string that carries a thought."""
    return _MARK + base64.b64encode(thought.encode()).decode()


def brought_back(given: object) -> str | None:
    """The thought in such a string; None for any other value."""
    if not isinstance(given, str) or not given.startswith(_MARK):
        return None
    try:
        return base64.b64decode(given.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
