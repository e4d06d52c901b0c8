"""Messages of Anthropic's API as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza.gateway.fields.field import shown
from cadenza.gateway.http.errors import ApiError, bad_request
from cadenza.gateway.openai.prompts import chat_prompt
from cadenza.prompts import Prompt

_ROLES = ("user", "assistant", "system")
_BLOCK_KEYS = frozenset(("type", "text", "cache_control", "citations"))


def messages_prompt(values: Mapping[str, Any]) -> Prompt:
    """The prompt; a last message of the assistant is continued, as in Anthropic's API. Raises ApiError."""
    messages = [_message(each, index) for index, each in enumerate(values["messages"])]
    if "system" in values:
        messages.insert(0, {"role": "system", "content": _text(values["system"], "system")})
    is_continued = bool(messages) and messages[-1]["role"] == "assistant"
    options = {"continue_final_message": is_continued, "cache_salt": values.get("cache_salt")}
    try:
        return chat_prompt(messages, options)
    except ApiError as error:
        raise bad_request(error.message, "messages") from None


def _message(message: Any, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise bad_request(f"{where} must be an object, not {shown(message)}", "messages")
    for name in message:
        if name not in ("role", "content"):
            raise bad_request(f"{where}.{shown(name)}: there is no such field", "messages")
    if message.get("role") not in _ROLES:
        raise bad_request(f"{where}.role must be user or assistant, not {shown(message.get('role'))}", "messages")
    return {"role": message["role"], "content": _text(message.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of text blocks, not {shown(content)}", "messages")
    texts = []
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise bad_request(f"{where}: only text blocks are supported, not {shown(block)}", "messages")
        for name in block:
            if name not in _BLOCK_KEYS:
                raise bad_request(f"{where}.{shown(name)}: there is no such field", "messages")
        texts.append(block["text"])
    return "".join(texts)
