"""What one step may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepBudget:
    """Tokens and sequences left in a step that is being planned."""

    num_tokens: int
    num_sequences: int

    @property
    def exhausted(self) -> bool:
        """Is there no room for anything more?"""
        return self.num_tokens <= 0 or self.num_sequences <= 0

    def spend(self, num_tokens: int) -> None:
        """One sequence takes this many tokens."""
        self.num_tokens -= num_tokens
        self.num_sequences -= 1
