"""Input of /v1/responses as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza.gateway.fields.field import shown
from cadenza.gateway.http.errors import ApiError, bad_request
from cadenza.gateway.openai.prompts import chat_prompt
from cadenza.prompts import Prompt

_TEXT_PARTS = ("input_text", "output_text", "text")
_MESSAGE_KEYS = frozenset(("type", "role", "content", "id", "status", "phase"))


def response_prompt(values: Mapping[str, Any]) -> Prompt:
    """The prompt of a request; raises ApiError."""
    given = values["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [_message(item, index) for index, item in enumerate(items)]
    if "instructions" in values:
        messages.insert(0, {"role": "system", "content": values["instructions"]})
    try:
        return chat_prompt(messages, values)
    except ApiError as error:
        raise bad_request(error.message.replace("messages", "input", 1), "input") from None


def _message(item: Any, index: int) -> dict[str, Any]:
    where = f"input[{index}]"
    if not isinstance(item, Mapping):
        raise bad_request(f"{where} must be an object, not {shown(item)}", "input")
    kind = item.get("type", "message")
    if kind != "message":
        raise bad_request(f"{where} is of type {shown(kind)}; only message is supported", "input")
    for name in item:
        if name not in _MESSAGE_KEYS:
            raise bad_request(f"{where}.{shown(name)}: there is no such field", "input")
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, where) for part in content]
    return {"role": item.get("role"), "content": content}


def _part(part: Any, where: str) -> Any:
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise bad_request(f"{where}: only text parts are supported, not {shown(part)}", "input")
