"""The bytes of tensors, by the headers of files."""

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
