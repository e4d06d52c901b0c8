"""OpenAI's messages as the scheduler's fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.calls.convert import prompt_to_proto
from cadenza.chats import chat_options
from cadenza.prompts import parse_chat
from scheduler_svc.convert.request_parts import chat_fields
from scheduler_svc.requests.chats.door import finished
from scheduler_svc.requests.chats.fields import ChatFields
from scheduler_svc.requests.tokenizer import Tokenizer


def chat_of(messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatFields:
    """What the scheduler reads of a chat that the client sends."""
    return chat_fields(prompt_to_proto(parse_chat(messages, chat_options(**options))).chat)


def encode_chat(tokenizer: Tokenizer, chat: ChatFields) -> list[int]:
    """The token ids of a chat, as a request's; raises ChatError."""
    return tokenizer.encode(finished(tokenizer.chats.render(chat)), add_special_tokens=False)


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON text, as OpenAI sends them."""
    return json.loads(json.dumps(messages), object_hook=_as_text)


def _as_text(value: dict[str, Any]) -> dict[str, Any]:
    if isinstance(value.get("arguments"), dict):
        return value | {"arguments": json.dumps(value["arguments"])}
    return value
