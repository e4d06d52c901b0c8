"""The budget of one step."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ADMITTED_VALUES = 256 * 1024
"""Maximum numbers in all admissions of one plan: an executor parses so many in 1.4 ms (docs/decisions/0025)."""

MAX_GROUP_TOKENS = 512 * 1024
"""Maximum prompt tokens of all sequences of a group together, since each keeps a list of them, and holds their blocks:
adding, planning and ending so many take under 5 ms each (docs/decisions/0025)."""


@dataclass(slots=True)
class StepBudget:
    """The remaining budget of a step during planning."""

    num_tokens: int
    num_sequences: int
    max_chunk: int = 0
    """Maximum tokens of one prompt; 0: no limit other than the budget."""
    num_values: int = MAX_ADMITTED_VALUES
    """Numbers left for the descriptions of admitted sequences."""

    @property
    def exhausted(self) -> bool:
        """Whether no tokens or no sequences are left."""
        return self.num_tokens <= 0 or self.num_sequences <= 0

    @property
    def chunk(self) -> int:
        """Maximum tokens of the next chunk."""
        return min(self.num_tokens, self.max_chunk or self.num_tokens)

    def take_values(self, count: int) -> bool:
        """Reserve `count` numbers for a description; False if they do not fit. The first description always fits."""
        fits = count <= self.num_values or self.num_values == MAX_ADMITTED_VALUES
        if fits:
            self.num_values -= count
        return fits

    def take_whole(self, num_tokens: int, num_values: int) -> bool:
        """Take all tokens of a sequence in one chunk, and its description; False without any change if they do not
        fit."""
        if self.num_sequences <= 0 or num_tokens > self.chunk or not self.take_values(num_values):
            return False
        self.num_tokens -= num_tokens
        self.num_sequences -= 1
        return True

    def spend(self, num_tokens: int, num_sequences: int = 1) -> None:
        """Subtract the tokens of one or several sequences."""
        self.num_tokens -= num_tokens
        self.num_sequences -= num_sequences
