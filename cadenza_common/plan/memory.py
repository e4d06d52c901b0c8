"""What an executor takes of its device's memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """What a part of an executor takes of its device's memory, in bytes."""

    name: str
    computed: int
    """Before it was made."""
    measured: int
    """What the device reported after it was made, less what it had reported before."""
