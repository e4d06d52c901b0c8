"""LoRA adapters in calls: names, vLLM's LoRARequest, and what a server says of its adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cadenza.sendable import sendable
from cadenza.v1 import admin_pb2

_MAX_CHARS = 128


class LoRARequest(Protocol):
    """vLLM's object, as far as it is read here: any object with these attributes."""

    @property
    def lora_name(self) -> str: ...

    @property
    def lora_path(self) -> str: ...


Adapter = str | LoRARequest | None
Adapters = Adapter | Iterable[Adapter]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter of a server."""

    name: str
    path: str
    content_hash: str  # in hexadecimal digits; empty until an executor has loaded it
    num_requests: int  # unfinished ones that use it
    executors: dict[str, str]  # by address: not_loaded, loading, loaded, unloading, failed
    error: str  # why an executor cannot load it; empty: each can


def adapter_name(adapter: object, where: str = "adapter") -> str:
    """The name of an adapter, or of a LoRARequest; empty: none. Raises ValueError."""
    if adapter is None:
        return ""
    name: object = getattr(adapter, "lora_name", adapter)
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_CHARS:
        shown = repr(adapter)[:100]
        raise ValueError(f"{where} must be a name of 1 to {_MAX_CHARS} characters, or a LoRARequest, not {shown}")
    return sendable(name, where)


def match_adapters(adapters: object, count: int, where: str = "adapter") -> list[str]:
    """One adapter's name for each of `count` prompts; raises ValueError."""
    if adapters is None or isinstance(adapters, str) or hasattr(adapters, "lora_name"):
        return [adapter_name(adapters, where)] * count
    if isinstance(adapters, (bytes, Mapping)) or not isinstance(adapters, Iterable):
        raise ValueError(f"{where} must be a name, or a list with one for each prompt, not {repr(adapters)[:100]}")
    items = list(adapters)
    if len(items) != count:
        raise ValueError(f"{where}: {len(items)} adapters for {count} prompts: give one, or one for each")
    return [adapter_name(item, f"{where} {index}") for index, item in enumerate(items)]


def lora_requests(requests: object) -> tuple[str | list[str | None], dict[str, str]]:
    """The names of one LoRARequest or of a list of them, and the paths by name, in the order of their first use.

    Raises ValueError.
    """
    many = isinstance(requests, Iterable) and not isinstance(requests, (str, bytes, Mapping))
    given = list(requests) if many and isinstance(requests, Iterable) else [requests]
    names = [adapter_name(each, f"lora_request{f' {index}' if many else ''}") for index, each in enumerate(given)]
    paths: dict[str, str] = {}
    for name, request in zip(names, given, strict=True):
        if path := getattr(request, "lora_path", None):
            paths.setdefault(name, str(path))
    return [name or None for name in names] if many else names[0], paths


def adapter_from_proto(message: admin_pb2.AdapterInfo) -> AdapterInfo:
    """An adapter as the server describes it."""
    states = {
        each.target: admin_pb2.AdapterState.Name(each.state).removeprefix("ADAPTER_STATE_").lower()
        for each in message.executors
    }
    error = next((each.error for each in message.executors if each.error), "")
    return AdapterInfo(message.name, message.path, message.content_hash.hex(), message.num_requests, states, error)
