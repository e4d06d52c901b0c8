"""Parses prompts, chats and their parameters, in the forms that vLLM accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from cadenza.adapters import Adapters, match_adapters
from cadenza.chats import ChatMessage, ChatOptions, Message, parse_messages
from cadenza.sampling_params import SamplingParams
from cadenza.sendable import sendable, short
from cadenza_common.wire.limits import MAX_DRAFTS

_FORMS = 'a str, {"prompt": str}, a list of token ids or {"prompt_token_ids": [...]}'
MAX_TOKEN_ID = 2**32 - 1


class TextPrompt(TypedDict):
    """A prompt as text, with vLLM's key."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, with vLLM's key."""

    prompt_token_ids: list[int]


SinglePrompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
Prompts = SinglePrompt | Sequence[SinglePrompt]
Messages = Sequence[Message | ChatMessage]
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What all prompts of a call have in common beside their parameters. Raises ValueError for a bad `speculation`."""

    enable_prefix_caching: bool = True  # use and fill the prefix cache
    speculation: int | None = None  # the most draft tokens in one step; 0 and False: none; None: as the server is set
    adapter: Adapters = None  # a LoRA adapter's name for all prompts, or a list with one for each

    def adapters(self, count: int) -> list[str]:
        """The adapter of each of `count` prompts; empty: none. Raises ValueError."""
        return match_adapters(self.adapter, count)

    def __post_init__(self) -> None:
        value: object = self.speculation
        if value is None or value is False:
            return
        # True would read as "switch it on", which a request cannot do.
        if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) <= MAX_DRAFTS:
            raise ValueError(
                f"speculation must be 0 (off) to {MAX_DRAFTS} draft tokens, or None (as the server is set), "
                f"not {short(value)}"
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in exactly one of its three forms."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    chat: ChatOptions | None = None  # of messages
    cache_salt: str | None = None  # only requests with the same salt share cached blocks


def parse_prompts(prompts: object) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt, a list of lists many.

    Raises a ValueError that names the index for anything that is not a prompt.
    """
    if isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts):
        return [parse_prompt(prompts)]
    if isinstance(prompts, (bytes, set, frozenset)) or not isinstance(prompts, Iterable):
        raise ValueError(f"a prompt is {_FORMS}, or a list of these, not {short(prompts)}")
    items = list(prompts)
    if not items:
        raise ValueError("no prompts: give at least one")
    return [parse_prompt(item, f"prompt {index}: ") for index, item in enumerate(items)]


def parse_prompt(prompt: object, where: str = "") -> Prompt:
    """Exactly one prompt; raises a ValueError that begins with `where`."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=sendable(prompt, f"{where}the prompt"))
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, where)
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, set, frozenset)):
        return Prompt(token_ids=_token_ids(prompt, where))
    raise ValueError(f"{where}a prompt is {_FORMS}, not {short(prompt)}")


def parse_chats(messages: object, options: ChatOptions | None = None) -> list[Prompt]:
    """One conversation or many, as a list of prompts; raises ValueError."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise ValueError(f'a conversation is a list of {{"role": ..., "content": ...}}, not {short(messages)}')
    items = list(messages)
    if not items:
        raise ValueError("no messages: give at least one")
    if isinstance(items[0], (Mapping, ChatMessage)):
        return [parse_chat(items, options)]
    return [parse_chat(item, options, f"conversation {index}: ") for index, item in enumerate(items)]


def parse_chat(messages: object, options: ChatOptions | None = None, where: str = "") -> Prompt:
    """One conversation as a prompt; raises a ValueError that begins with `where`."""
    return Prompt(messages=parse_messages(messages, where), chat=options)


def parse_text_or_chat(value: object, options: ChatOptions | None = None) -> Prompt:
    """A prompt that can be tokenized, a text or a conversation; raises ValueError."""
    return Prompt(text=sendable(value, "the text")) if isinstance(value, str) else parse_chat(value, options)


def parse_request_id(value: object) -> str:
    """A request's id, empty for None; raises ValueError."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"request_id must be a str, not {short(value)}")
    return sendable(value, "request_id")


def parse_token_ids(value: object) -> list[int]:
    """Token ids, possibly none; raises ValueError for anything else."""
    return [] if isinstance(value, Sized) and len(value) == 0 else _token_ids(value, "")


def match_params(params: object, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts; raises ValueError or TypeError."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, bytes, Mapping)) or not isinstance(params, Iterable):
        raise TypeError(f"params must be a SamplingParams or a list of them, not {short(params)}")
    items = list(params)
    if len(items) != count:
        raise ValueError(f"{len(items)} SamplingParams for {count} prompts: give one, or one for each")
    for index, item in enumerate(items):
        if not isinstance(item, SamplingParams):
            raise TypeError(f"params {index} must be a SamplingParams, not {short(item)}")
    return items


def _parse_mapping(prompt: Mapping[str, Any], where: str) -> Prompt:
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        raise ValueError(f"{where}a prompt cannot have {', '.join(sorted(map(str, unknown)))}: it is {_FORMS}")
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"{where}cache_salt must be a str, not {short(salt)}")
    sendable(salt or "", f"{where}cache_salt")
    if prompt.get("prompt_token_ids") is not None:  # as in vLLM, token ids take precedence over a text
        return Prompt(token_ids=_token_ids(prompt["prompt_token_ids"], where), cache_salt=salt)
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise ValueError(f"{where}a prompt is {_FORMS}, not {short(prompt)}")
    return Prompt(text=sendable(text, f"{where}the prompt"), cache_salt=salt)


def _is_token_ids(value: object) -> bool:
    """Whether the value is a non-empty flat sequence of integers: one prompt, not several."""
    # An array of numpy or torch is not a Sequence and its elements are not int, but it converts to a list.
    items = value.tolist() if hasattr(value, "tolist") else value
    return isinstance(items, Sequence) and not isinstance(items, (str, bytes)) and isinstance(_first(items), Integral)


def _first(items: Sequence[object]) -> object:
    return items[0] if items else None


def _token_ids(value: Any, where: str) -> list[int]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{where}prompt_token_ids must be a list of integers, not {short(value)}")
    ids = value.tolist() if hasattr(value, "tolist") else list(value)
    if not ids:
        raise ValueError(f"{where}a prompt of token ids needs at least one")
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise ValueError(f"{where}a list prompt holds token ids only, not {short(token_id)}")
        if not 0 <= int(token_id) <= MAX_TOKEN_ID:
            raise ValueError(f"{where}{int(token_id)} is no token id")
    return [int(token_id) for token_id in ids]
