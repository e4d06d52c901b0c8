"""What a tensor of a file takes in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A tensor of a file."""

    name: str
    kind: str
    """The format."""
    num_bytes: int
    """In memory."""
    is_expert: bool
