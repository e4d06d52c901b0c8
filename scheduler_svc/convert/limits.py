"""Size limits of request fields, checked on the message itself, before oversized content is unpacked.

One table for all calls. The comments in the protos state the same numbers; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from cadenza.v1 import types_pb2
from cadenza_common.wire.transport import MAX_REQUEST_BYTES
from scheduler_svc.convert.wire import largest_field, sizes_of
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.requests.chats.fields import MAX_PROMPT_CHARS
from scheduler_svc.requests.tokenizer import MAX_PROMPT_TOKENS

MAX_LIST_BYTES = 768 * 1024
"""Limit of all lists of numbers in a message. Parsing is one call that holds the interpreter: this limit, the next one
and MAX_REQUEST_BYTES keep it under 5 ms, at the measured 0.5 ns a byte of text, 3.2 of token ids and 7.5 to 20 of small
fields (docs/decisions/0025)."""
MAX_OTHER_BYTES = 192 * 1024
"""Limit of all else in a message: neither texts nor lists of numbers."""
MAX_TOOL_CALLS = 512
"""Limit of the calls of all messages of a chat: each is three fields, and checked in 4 us."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PACKAGE = "cadenza.v1."


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of one field; None: no limit of this kind."""

    length: int | None = None
    """Maximum length: of a string in characters, of bytes in bytes; in a list, of each item."""
    items: int | None = None
    """Maximum number of entries of a list or map."""
    total: int | None = None
    """Maximum length of all entries of a list together, in characters."""
    is_id: bool = False
    """Control characters are not allowed, because ids appear in logs and messages."""


_ID = Limit(length=128, is_id=True)

LIMITS: Mapping[str, Limit] = {
    "GenerateRequest.request_id": _ID,
    "GenerateRequest.adapter": _ID,
    "LoadAdapterRequest.name": _ID,
    "LoadAdapterRequest.path": Limit(length=4096, is_id=True),
    "UnloadAdapterRequest.name": _ID,
    "GenerateRequest.cache_salt": Limit(length=128),
    "GenerateRequest.prompt": Limit(items=1024),
    "GenerateRequest.traceparent": Limit(length=128),
    "TokenizeRequest.prompt": Limit(items=1024),
    "ResumePoint.positions": Limit(items=1024),
    "Chat.messages": Limit(items=512),
    "Chat.tools": Limit(items=512, total=1_048_576),
    "Chat.documents": Limit(items=1024, total=1_048_576),
    "Chat.template_kwargs": Limit(length=65_536),
    "Chat.template": Limit(length=262_144),
    "ChatMessage.role": Limit(length=64),
    "ChatMessage.tool_calls": Limit(items=MAX_TOOL_CALLS),
    "ChatMessage.tool_call_id": Limit(length=256),
    "ChatMessage.name": Limit(length=256),
    "ToolCall.id": Limit(length=256),
    "ToolCall.name": Limit(length=256),
    "ToolCall.arguments": Limit(length=262_144),
    "SamplingParams.stop": Limit(length=256, items=128),
    "SamplingParams.stop_token_ids": Limit(items=1024),
    "SamplingParams.logit_bias": Limit(items=2048),
    "SamplingParams.allowed_token_ids": Limit(items=131_072),
    "SamplingParams.bad_words": Limit(length=128, items=128),
    "GrammarSpec.json_schema": Limit(length=262_144),
    "GrammarSpec.regex": Limit(length=262_144),
    "GrammarSpec.grammar": Limit(length=262_144),
    "GrammarSpec.structural_tag": Limit(length=262_144),
    "GrammarSpec.whitespace_pattern": Limit(length=256),
    "GrammarSpec.start_after_token_ids": Limit(items=64),
    "GrammarChoices.values": Limit(length=4096, items=1024),
    "DetokenizeRequest.token_ids": Limit(items=131_072),
    "AbortRequest.request_id": _ID,
    "GetBlockTableRequest.request_id": _ID,
    "GetBlockTableRequest.tenant": _ID,
}
_HOLDERS = frozenset({name.partition(".")[0] for name in LIMITS} | {"PromptPart"})
"""Message types that contain limited fields; others are not searched."""


def check_size(raw: bytes, message: type[Message]) -> None:
    """Check the size of a message that is not parsed yet; raises RequestRejectedError.

    The field is the one that has most of the message, or `message` where all of it is too long.
    """
    if len(raw) > MAX_REQUEST_BYTES:
        raise RequestRejectedError("message", f"has {len(raw)} bytes; at most {MAX_REQUEST_BYTES} are allowed")
    if len(raw) <= MAX_OTHER_BYTES:
        return
    sizes = sizes_of(raw, message)
    for name, num_bytes, limit in (
        ("in lists of numbers", sizes.lists, MAX_LIST_BYTES),
        ("beside its texts and lists of numbers", sizes.others, MAX_OTHER_BYTES),
    ):
        if num_bytes > limit:
            why = f"the request has {num_bytes} bytes {name}, most of them here; at most {limit} are allowed"
            raise RequestRejectedError(largest_field(raw, message), why)


def check_limits(message: Message) -> None:
    """Check the sizes of a request's fields; raises RequestRejectedError with the field's path."""
    for path, name, value in _limited(message, ""):
        _check(path, value, LIMITS[name])
        if name == "Chat.messages":
            _check_tool_calls(path, value)
        elif name.endswith(".prompt"):
            _check_alone(path, value)
    prompt = getattr(message, "prompt", None)
    if prompt:
        _check_prompt(prompt)


def check_request_id(request_id: str) -> None:
    """Check that a request id is given; raises RequestRejectedError."""
    if not request_id:
        raise RequestRejectedError("request_id", "must be given")


def _limited(message: Message, path: str) -> Iterable[tuple[str, str, Any]]:
    """(path, key in LIMITS, value) of each limited field that is set, a list before its items."""
    for field, value in message.ListFields():
        name, field_path = field.full_name.removeprefix(_PACKAGE), path + field.name
        if name in LIMITS:
            yield field_path, name, value
        if field.message_type is None or field.message_type.name not in _HOLDERS:
            continue
        if field.is_repeated:
            for index, item in enumerate(value):
                yield from _limited(item, f"{field_path}[{index}].")
        else:
            yield from _limited(value, f"{field_path}.")


def _check(path: str, value: Any, limit: Limit) -> None:
    if limit.items is not None and len(value) > limit.items:
        raise RequestRejectedError(path, f"has {len(value)} entries; at most {limit.items} are allowed")
    if limit.total is not None and (total := sum(map(len, value))) > limit.total:
        raise RequestRejectedError(path, f"has {total} characters in all; at most {limit.total} are allowed")
    if limit.length is None:
        return
    if isinstance(value, (str, bytes)):
        _check_length(path, value, limit)
        return
    assert isinstance(value, Sequence), path
    for index, item in enumerate(value):
        _check_length(f"{path}[{index}]", item, limit)


def _check_alone(path: str, prompt: Sequence[types_pb2.PromptPart]) -> None:
    """Check that a chat is the only part of a prompt: so its messages are all there are to be checked."""
    if len(prompt) > 1:
        for index, part in enumerate(prompt):
            if part.HasField("chat"):
                raise RequestRejectedError(f"{path}[{index}].chat", "a chat must be the only part of a prompt")


def _check_tool_calls(path: str, messages: Iterable[types_pb2.ChatMessage]) -> None:
    """Check the number of all calls, before each of them is; a list that is too long by itself is found with them."""
    num_calls = 0
    for index, message in enumerate(messages):
        if len(message.tool_calls) > MAX_TOOL_CALLS:
            return
        num_calls += len(message.tool_calls)
        if num_calls > MAX_TOOL_CALLS:
            raise RequestRejectedError(
                f"{path}[{index}].tool_calls", f"the chat has over {MAX_TOOL_CALLS} calls in all its messages"
            )


def _check_length(path: str, value: str | bytes, limit: Limit) -> None:
    assert limit.length is not None
    if len(value) > limit.length:
        unit = "bytes" if isinstance(value, bytes) else "characters"
        raise RequestRejectedError(path, f"has {len(value)} {unit}; at most {limit.length} are allowed")
    if limit.is_id and isinstance(value, str) and (found := _CONTROL.search(value)):
        raise RequestRejectedError(path, f"must hold no control characters, such as {found[0]!r}")


def _check_prompt(prompt: Iterable[types_pb2.PromptPart]) -> None:
    """Check the sums over the parts; the error names the part that exceeds them."""
    num_chars = num_tokens = 0
    for index, part in enumerate(prompt):
        num_tokens += len(part.tokens.ids)
        num_chars += len(part.text) + sum(map(_num_chars, part.chat.messages))
        if num_chars > MAX_PROMPT_CHARS:
            raise RequestRejectedError(
                f"prompt[{index}]", f"the prompt's texts have over {MAX_PROMPT_CHARS} characters in all"
            )
        if num_tokens > MAX_PROMPT_TOKENS:
            raise RequestRejectedError(f"prompt[{index}]", f"the prompt has over {MAX_PROMPT_TOKENS} token ids")


def _num_chars(message: types_pb2.ChatMessage) -> int:
    arguments = sum(len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning_content) + arguments
