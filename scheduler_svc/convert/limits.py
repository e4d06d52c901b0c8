"""How much a request's fields may hold, checked on the message itself: what is far too long is never unpacked.

One table for every call. The comments in the protos state the same numbers, which a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from cadenza.v1 import types_pb2
from scheduler_svc.core.errors import RequestRejectedError

MAX_PROMPT_CHARS = 16 * 1024 * 1024
"""Of all texts of a prompt together. A token is seldom more than a few characters, and no model reads that many."""
MAX_PROMPT_TOKENS = 4 * 1024 * 1024
"""Of all token ids of a prompt together, before it is truncated."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PACKAGE = "cadenza.v1."


@dataclass(frozen=True, slots=True)
class Limit:
    """What one field may hold; None: no limit of this kind."""

    length: int | None = None
    """Of a string in characters, of bytes in bytes; in a list, of each item."""
    items: int | None = None
    """Entries of a list or map."""
    is_id: bool = False
    """No control characters: ids stand in logs and in messages."""


_ID = Limit(length=128, is_id=True)

LIMITS: Mapping[str, Limit] = {
    "GenerateRequest.request_id": _ID,
    "GenerateRequest.tenant": _ID,
    "GenerateRequest.cache_salt": Limit(length=128),
    "GenerateRequest.prompt": Limit(items=1024),
    "TokenizeRequest.prompt": Limit(items=1024),
    "Chat.messages": Limit(items=4096),
    "ChatMessage.role": Limit(length=64),
    "SamplingParams.stop": Limit(length=1024, items=128),
    "SamplingParams.stop_token_ids": Limit(items=1024),
    "SamplingParams.logit_bias": Limit(items=16_384),
    "SamplingParams.allowed_token_ids": Limit(items=262_144),
    "SamplingParams.bad_words": Limit(length=128, items=128),
    "DetokenizeRequest.token_ids": Limit(items=1024 * 1024),
    "AbortRequest.request_id": _ID,
    "AbortRequest.tenant": _ID,
    "GetBlockTableRequest.request_id": _ID,
    "GetBlockTableRequest.tenant": _ID,
}
_HOLDERS = frozenset({name.partition(".")[0] for name in LIMITS} | {"PromptPart"})
"""Messages with limits somewhere in them: no others are looked into."""


def check_limits(message: Message) -> None:
    """Check the lengths of a request's fields; raises RequestRejectedError with the field's path."""
    for path, name, value in _limited(message, ""):
        _check(path, value, LIMITS[name])
    prompt = getattr(message, "prompt", None)
    if prompt:
        _check_prompt(prompt)


def check_request_id(request_id: str) -> None:
    """Calls about a request must say which; raises RequestRejectedError."""
    if not request_id:
        raise RequestRejectedError("request_id", "must be given")


def _limited(message: Message, path: str) -> Iterable[tuple[str, str, Any]]:
    """(path, key in LIMITS, value) of each limited field that is set, a list before what is in it."""
    for field, value in message.ListFields():
        name, spot = field.full_name.removeprefix(_PACKAGE), path + field.name
        if name in LIMITS:
            yield spot, name, value
        if field.message_type is None or field.message_type.name not in _HOLDERS:
            continue
        if field.is_repeated:
            for index, item in enumerate(value):
                yield from _limited(item, f"{spot}[{index}].")
        else:
            yield from _limited(value, f"{spot}.")


def _check(path: str, value: Sized, limit: Limit) -> None:
    if limit.items is not None and len(value) > limit.items:
        raise RequestRejectedError(path, f"has {len(value)} entries; at most {limit.items} are allowed")
    if limit.length is None:
        return
    if isinstance(value, (str, bytes)):
        _check_length(path, value, limit)
        return
    assert isinstance(value, Sequence), path
    for index, item in enumerate(value):
        _check_length(f"{path}[{index}]", item, limit)


def _check_length(path: str, value: str | bytes, limit: Limit) -> None:
    assert limit.length is not None
    if len(value) > limit.length:
        unit = "bytes" if isinstance(value, bytes) else "characters"
        raise RequestRejectedError(path, f"has {len(value)} {unit}; at most {limit.length} are allowed")
    if limit.is_id and isinstance(value, str) and (found := _CONTROL.search(value)):
        raise RequestRejectedError(path, f"must hold no control characters, such as {found[0]!r}")


def _check_prompt(prompt: Iterable[types_pb2.PromptPart]) -> None:
    """The sums over the parts; names the part that goes beyond."""
    num_chars = num_tokens = 0
    for index, part in enumerate(prompt):
        num_tokens += len(part.tokens.ids)
        num_chars += len(part.text) + sum(len(message.content) for message in part.chat.messages)
        if num_chars > MAX_PROMPT_CHARS:
            raise RequestRejectedError(
                f"prompt[{index}]", f"the prompt's texts have over {MAX_PROMPT_CHARS} characters in all"
            )
        if num_tokens > MAX_PROMPT_TOKENS:
            raise RequestRejectedError(f"prompt[{index}]", f"the prompt has over {MAX_PROMPT_TOKENS} token ids")
