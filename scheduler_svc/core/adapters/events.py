"""Events of LoRA adapters, and the commands that executors get for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterFailure:
    """Why an adapter cannot be loaded: a gRPC status code's number, and a message."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class AdapterRegistered:
    """An adapter got a name and an index: 1 or more, never used for another one."""

    index: int
    name: str
    path: str
    wanted: bool = False
    """Whether it is loaded as if a request needed it, until an executor has loaded it once."""


@dataclass(frozen=True, slots=True)
class AdapterRemoved:
    """An adapter's name was taken away: it is unloaded when no request uses it."""

    index: int


@dataclass(frozen=True, slots=True)
class AdapterDue:
    """A request has waited long for an adapter: it takes the place of one that no request runs with."""

    index: int


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """An executor's answer to a load."""

    index: int
    content_hash: bytes = b""
    """Adapters with equal hashes give equal tokens; empty with an error."""
    num_bytes: int = 0
    rank: int = 0
    error: AdapterFailure | None = None


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    """An executor's answer to an unload."""

    index: int


AdapterEvent = AdapterRegistered | AdapterRemoved | AdapterDue | AdapterLoaded | AdapterUnloaded


@dataclass(frozen=True, slots=True)
class AdapterCommands:
    """What an executor is to do next: the unloads first. Both go before the next plan."""

    unloads: tuple[int, ...] = ()
    loads: tuple[AdapterRegistered, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.unloads or self.loads)
