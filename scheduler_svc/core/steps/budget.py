"""The budget of one step."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.sequences.sequence import SequenceGroup

MAX_ADMITTED_VALUES = 256 * 1024
"""Maximum numbers in all admissions of one plan: an executor parses so many in 1.4 ms (docs/decisions/0025)."""

MAX_GROUP_TOKENS = 2 * 1024 * 1024
"""Maximum prompt tokens of all sequences of a group together, since each has a table of the blocks that they share:
adding, planning, swapping and ending so many take under 5 ms each (docs/decisions/0025)."""

MAX_ADMITTED_SEQUENCES = 256
"""Maximum sequences admitted by one plan, unless one group has more: new requests of one sequence, which are admitted
all at once, take 6 us each (docs/decisions/0025)."""

SINGLE_WEIGHT = 4
"""A sequence that is admitted with its group alone counts as so many: it takes 35 to 50 us."""

MAX_ADMITTED_TOKENS = 128 * 1024
"""Maximum tokens of the sequences admitted by one plan, unless one group has more: for a cached block of them a plan
takes 0.3 us (docs/decisions/0025)."""

MAX_PROMPT_LOGPROBS = 128 * 1024
"""Maximum prompt logprobs of one step: the chosen and the top ones of each prompt token. A scheduler parses so many in
0.8 ms (docs/decisions/0025)."""


@dataclass(slots=True)
class AdmissionBudget:
    """What one plan may still admit. The first group may always be admitted."""

    num_groups: int
    num_sequences: int = MAX_ADMITTED_SEQUENCES
    num_tokens: int = MAX_ADMITTED_TOKENS
    num_admitted: int = 0
    """Number of groups admitted so far."""

    def allows(self, group: SequenceGroup, weight: int = 1) -> bool:
        """Whether a waiting group, each sequence of which counts as `weight`, may be admitted by this plan."""
        fits = weight * len(group.sequences) <= self.num_sequences and _num_tokens(group) <= self.num_tokens
        return fits or not self.num_admitted

    def spend(self, group: SequenceGroup, weight: int = 1) -> None:
        """Count an admitted group."""
        self.num_admitted += 1
        self.num_groups -= 1
        self.num_sequences -= weight * len(group.sequences)
        self.num_tokens -= _num_tokens(group)


def _num_tokens(group: SequenceGroup) -> int:
    """Number of tokens of its sequences; a token that several share counts for each."""
    return len(group.sequences) * group.sequences[0].num_tokens


@dataclass(slots=True)
class StepBudget:
    """The remaining budget of a step during planning."""

    num_tokens: int
    num_sequences: int
    max_chunk: int = 0
    """Maximum tokens of one prompt; 0: no limit other than the budget."""
    num_values: int = MAX_ADMITTED_VALUES
    """Numbers left for the descriptions of admitted sequences."""
    num_prompt_logprobs: int = MAX_PROMPT_LOGPROBS
    """Prompt logprobs left for the result of this step."""

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

    def take_prompt_logprobs(self, num_tokens: int, width: int) -> int:
        """Reserve the logprobs of prompt tokens, `width` each; returns how many of the tokens fit.

        The first token of a step always fits.
        """
        least = 1 if self.num_prompt_logprobs == MAX_PROMPT_LOGPROBS else 0
        fitting = min(num_tokens, max(least, self.num_prompt_logprobs // width))
        self.num_prompt_logprobs -= fitting * width
        return fitting

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
