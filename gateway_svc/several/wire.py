"""Between a gateway of several models and the launcher that owns their processes: JSON lines over a local socket.

The launcher says at first what the bounds are, then the status of each model, at once and whenever it changes. The
gateway orders models to be loaded and unloaded, and decides when. A gateway that is started again connects anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

_SOCKET, _ADDRESS = "_CADENZA_POOL", "_CADENZA_DOOR"


@dataclass(frozen=True, slots=True)
class DoorPlace:
    """What makes a gateway one of several models; whoever starts it says so by variables."""

    socket: str
    """Path of the launcher's socket."""
    address: str
    """HOST:PORT at which the gateway serves Cadenza's own gRPC."""

    def environment(self) -> dict[str, str]:
        """As variables."""
        return {_SOCKET: self.socket, _ADDRESS: self.address}


def door_place(environment: Mapping[str, str]) -> DoorPlace | None:
    """The one that the variables have; None: the gateway serves one model."""
    if _SOCKET not in environment:
        return None
    return DoorPlace(environment[_SOCKET], environment[_ADDRESS])


class LoadState(StrEnum):
    """Where a model is between its file and its processes."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"
    """As unloaded, but its last start failed, or its services were given up."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the gateway heeds; 0: none."""

    memory_bytes: int = 0
    """Of the memory of models at once."""
    max_loaded: int = 0
    unload_after_s: float = 0.0
    """A model without a request for so long is unloaded."""
    load_timeout_s: float = 600.0
    """How long a request waits for its model."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model, as the launcher knows it."""

    name: str
    model: str
    """Folder, file or hub id."""
    state: LoadState = LoadState.UNLOADED
    target: str = ""
    """HOST:PORT of its scheduler while it is loaded."""
    memory_bytes: int = 0
    """What it takes, or would take."""
    error: str = ""
    """Why it failed."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the gateway that are its own."""


def write_line(value: Bounds | ModelStatus) -> bytes:
    """A line of the launcher's."""
    kind = "bounds" if isinstance(value, Bounds) else "model"
    return json.dumps({kind: asdict(value)}).encode() + b"\n"


def read_line(line: bytes) -> Bounds | ModelStatus:
    """What `write_line` wrote."""
    value: dict[str, Any] = json.loads(line)
    if "bounds" in value:
        return Bounds(**value["bounds"])
    found = value["model"]
    return ModelStatus(**{**found, "state": LoadState(found["state"])})


def write_order(order: str, name: str) -> bytes:
    """A line of the gateway's; order: load or unload."""
    return json.dumps({order: name}).encode() + b"\n"


def read_order(line: bytes) -> tuple[str, str]:
    """The order and the model's name."""
    ((order, name),) = json.loads(line).items()
    return order, name
