"""Chooses the number of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class DraftedStep:
    """What one result says."""

    num_decodes: int
    num_drafting: int
    max_drafts: int
    num_drafts: int
    num_accepted: int
    accepted_at: Sequence[int]
    drafted_at: Sequence[int]
    num_other_tokens: int
    step_ns: int


class DraftControl:
    """Always the most."""

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self._most = most

    def choose(self, num_decodes: int) -> int:
        """The number of drafts for a step."""
        return self._most

    def observe(self, step: DraftedStep) -> None:
        """A result."""
