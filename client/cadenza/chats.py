"""Conversations as OpenAI and vLLM write them: messages with tool calls, and how they are rendered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.sendable import sendable, short

Message = Mapping[str, Any]
"""OpenAI's {"role": str, "content": str or a list of {"type": "text", "text": str}, "tool_calls": [...], ...}."""
JsonObjects = Sequence[Mapping[str, Any]] | None
"""Tools or documents."""
_CALL_FORM = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
_IGNORED = frozenset(("refusal", "annotations"))
"""What OpenAI's client writes into a message of the assistant, and no template reads."""
_PARTS = {"text": "text", "refusal": "refusal"}
"""By the type of a part of a content: the key of its text."""
_MAX_KIND = 40


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function by the assistant."""

    name: str
    arguments: str = ""  # a JSON object; empty: {}
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str | None = None  # None: nothing but tool_calls or reasoning_content
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of role tool: the call that it answers
    name: str = ""
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered; `chat_options` makes one. Raises ValueError for both of the first two at once."""

    add_generation_prompt: bool = True  # end with the header of the assistant's turn
    continue_final_message: bool = False  # leave the last message open, so that the answer continues it
    tools: tuple[str, ...] = ()  # a JSON object each, as all that follows but the template
    documents: tuple[str, ...] = ()
    chat_template_kwargs: str = ""  # empty: none
    chat_template: str = ""  # empty: the model's

    def __post_init__(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, not {short(getattr(self, name))}")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message needs add_generation_prompt=False: no new turn is begun")


def chat_options(
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: object = None,
    documents: object = None,
    chat_template_kwargs: object = None,
    chat_template: object = None,
) -> ChatOptions:
    """The options of a chat from the arguments of `AsyncClient.chat`; raises a ValueError that names the wrong one."""
    if chat_template is not None and not isinstance(chat_template, str):
        raise ValueError(f"chat_template must be a str, the template itself, not {short(chat_template)}")
    return ChatOptions(
        add_generation_prompt,
        continue_final_message,
        tools=_json_objects(tools, "tools"),
        documents=_json_objects(documents, "documents"),
        chat_template_kwargs=_json_object(chat_template_kwargs, "chat_template_kwargs") if chat_template_kwargs else "",
        chat_template=sendable(chat_template or "", "chat_template"),
    )


def parse_messages(messages: object, where: str = "") -> list[ChatMessage]:
    """The messages of one conversation; raises a ValueError that begins with `where`."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise ValueError(f'{where}a conversation is a list of {{"role": ..., "content": ...}}, not {short(messages)}')
    parsed = [_parse_message(message, f"{where}message {index}") for index, message in enumerate(messages)]
    if not parsed:
        raise ValueError(f"{where}no messages: give at least one")
    return parsed


def _parse_message(message: object, spot: str) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if not isinstance(message, Mapping):
        raise ValueError(f'{spot} must be {{"role": ..., "content": ...}}, not {short(message)}')
    given = {name: value for name, value in message.items() if value is not None and name not in _IGNORED}
    role = given.pop("role", None)
    if not isinstance(role, str) or not role:
        raise ValueError(f"{spot} has no role")
    content = given.pop("content", None)
    tool_calls = _tool_calls(given.pop("tool_calls", ()), f"{spot}: tool_calls")
    # Answers have both names, and clients send an answer back as it is.
    thought, same = (_text(given.pop(key, None), f"{spot}: {key}") for key in ("reasoning_content", "reasoning"))
    thought = same if thought is None else thought
    tool_call_id = _text(given.pop("tool_call_id", None), f"{spot}: tool_call_id") or ""
    name = _text(given.pop("name", None), f"{spot}: name") or ""
    if given:
        raise ValueError(f"{spot} cannot have {', '.join(sorted(map(str, given)))}")
    if content is None and role == "tool" and "content" in message:
        content = ""  # a tool that gives nothing back
    if content is None and not tool_calls and thought is None and "content" not in message:
        raise ValueError(f"{spot}: content is missing")
    if content is not None or not (tool_calls or thought is not None):
        content = sendable(_content(content, spot), f"{spot}: content")
    return ChatMessage(sendable(role, f"{spot}: role"), content, tool_calls, tool_call_id, name, thought)


def _tool_calls(value: object, spot: str) -> tuple[ToolCall, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{spot} must be a list, not {short(value)}")
    return tuple(_tool_call(call, f"{spot}[{index}]") for index, call in enumerate(value))


def _tool_call(call: object, spot: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise ValueError(f"{spot} must be {_CALL_FORM}, not {short(call)}")
    name = _text(function.get("name"), f"{spot}.function.name")
    if not name:
        raise ValueError(f"{spot}.function has no name")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        text = _json_object(arguments, f"{spot}.function.arguments")
    else:
        text = _text(arguments, f"{spot}.function.arguments", "a str or an object") or ""
    return ToolCall(name, text, _text(call.get("id"), f"{spot}.id") or "")


def _content(content: object, spot: str) -> str:
    """The text of a content; parts are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        raise ValueError(f"{spot}: content must be a str or a list of text parts, not {short(content)}")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif (text := text_of_part(part)) is not None:
            texts.append(text)
        else:
            raise ValueError(f"{spot}: only text parts are supported, not {kind_of_part(part) or short(part)}")
    return "".join(texts)


def text_of_part(part: object) -> str | None:
    """The text of a part, also of a refusal that an answer had; None: it has none."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = _PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(key) if isinstance(part, Mapping) and key is not None else None
    return text if isinstance(text, str) else None


def kind_of_part(part: object) -> str:
    """What a part is that has no text, for messages: its data may be a whole picture; empty: it does not say."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return f"one of type {kind[:_MAX_KIND]!a}" if isinstance(kind, str) and "text" not in kind else ""


def _text(value: object, spot: str, what: str = "a str") -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{spot} must be {what}, not {short(value)}")
    return sendable(value, spot)


def _json_objects(value: object, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of objects, not {short(value)}")
    return tuple(_json_object(each, f"{name}[{index}]") for index, each in enumerate(value))


def _json_object(value: object, spot: str) -> str:
    """The JSON text of an object, its keys in order."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{spot} must be an object, not {short(value)}")
    try:
        text = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{spot} cannot be written as JSON: {error}") from None
    return sendable(text, spot)
