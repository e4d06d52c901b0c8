"""What one step may hold."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ADMITTED_VALUES = 6 * 1024 * 1024
"""Numbers that all admissions of one plan may hold: of five bytes or less each, they fit a message of 64 MiB."""


@dataclass(slots=True)
class StepBudget:
    """What is left in a step that is being planned."""

    num_tokens: int
    num_sequences: int
    max_chunk: int = 0
    """Most tokens of one prompt; 0: no limit but the budget's."""
    num_values: int = MAX_ADMITTED_VALUES
    """Numbers in the descriptions of sequences that are admitted."""

    @property
    def exhausted(self) -> bool:
        """Is there no room for anything more?"""
        return self.num_tokens <= 0 or self.num_sequences <= 0

    @property
    def chunk(self) -> int:
        """Tokens that one prompt may still have."""
        return min(self.num_tokens, self.max_chunk or self.num_tokens)

    def take_values(self, count: int) -> bool:
        """Describe a sequence of this many numbers in the plan, if there is room; the first one always has."""
        fits = count <= self.num_values or self.num_values == MAX_ADMITTED_VALUES
        if fits:
            self.num_values -= count
        return fits

    def spend(self, num_tokens: int, num_sequences: int = 1) -> None:
        """One sequence, or several, take this many tokens."""
        self.num_tokens -= num_tokens
        self.num_sequences -= num_sequences
