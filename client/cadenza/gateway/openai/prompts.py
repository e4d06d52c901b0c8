"""Prompts of completions and chats, in all the forms that clients send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.gateway.fields.field import shown
from cadenza.gateway.fields.sampling import utf8
from cadenza.gateway.http.errors import bad_request
from cadenza.prompts import ChatOptions, Prompt, parse_chat, parse_prompts

MAX_PROMPTS = 1024
"""Prompts of one request."""
_IGNORED_KEYS = frozenset(("role", "content", "name", "refusal", "annotations", "audio"))
_TOOL_KEYS = ("tool_calls", "tool_call_id", "function_call", "reasoning", "reasoning_content")
_ROLES = {"developer": "system"}
"""Roles that stand for another one: templates know system."""


def completion_prompts(value: Any, cache_salt: str | None) -> list[Prompt]:
    """The prompts of a completion: a text, texts, token ids, or lists of token ids. Raises ApiError."""
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise bad_request(f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        raise bad_request("prompt must hold texts, or lists of token ids", "prompt")
    try:
        prompts = parse_prompts(value)
    except ValueError as error:
        raise bad_request(f"prompt: {error}"[:500], "prompt") from None
    return [with_salt(each, cache_salt) for each in prompts]


def chat_prompt(messages: Sequence[Any], values: Mapping[str, Any]) -> Prompt:
    """The prompt of a chat; the scheduler renders it. Raises ApiError."""
    try:
        options = ChatOptions(
            values.get("add_generation_prompt", not values.get("continue_final_message", False)),
            values.get("continue_final_message", False),
        )
    except ValueError as error:
        raise bad_request(str(error), "continue_final_message") from None
    try:
        prompt = parse_chat([_message(each, index) for index, each in enumerate(messages)], options)
    except ValueError as error:
        raise bad_request(f"messages: {error}"[:500], "messages") from None
    return with_salt(prompt, values.get("cache_salt"))


def with_salt(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """The prompt with a salt of its blocks' hashes; raises ApiError."""
    return (
        prompt
        if cache_salt is None
        else Prompt(prompt.text, prompt.token_ids, prompt.messages, prompt.chat, utf8(cache_salt, "cache_salt"))
    )


def last_assistant_text(prompt: Prompt) -> str:
    """The text of a chat's last message if it is the assistant's; else nothing."""
    if not prompt.messages or prompt.messages[-1][0] != "assistant":
        return ""
    return prompt.messages[-1][1]


def _message(message: Any, index: int) -> Any:
    """A message with what can be rendered; raises ApiError for what cannot."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise bad_request(f"{where} must be an object with role and content, not {shown(message)}", "messages")
    for name in message:
        if name in _TOOL_KEYS:
            if message[name] not in (None, []):
                raise bad_request(
                    f"{where}.{name} is not supported: tools are not rendered into prompts yet", "messages"
                )
        elif name not in _IGNORED_KEYS:
            raise bad_request(f"{where}.{shown(name)}: there is no such field", "messages")
    if message.get("audio") is not None:
        raise bad_request(f"{where}.audio is not supported: the model reads text alone", "messages")
    content = message.get("content")
    if content is None and message.get("role") == "assistant":
        content = ""
    role = message.get("role")
    return {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content}
