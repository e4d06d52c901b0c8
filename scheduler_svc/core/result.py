"""The result of a step, as the core reads it: tokens, logprobs and errors by batch slot, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one token: logprob and rank (from 1) of the chosen id, and the top ids with theirs, best first."""

    logprob: float
    rank: int
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best next tokens of one slot, best first, with their scores: see SlotCandidates in execution.proto."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt tokens, in columns, as LogprobColumns in types.proto."""

    start: int
    """Prompt index of the first row, 1 or more."""
    logprobs: Sequence[float]
    ranks: Sequence[int]
    num_top: int
    top_token_ids: Sequence[int]
    """[num_tokens * num_top]."""
    top_logprobs: Sequence[float]

    @property
    def end(self) -> int:
        """Prompt index after the last row."""
        return self.start + len(self.logprobs)

    def rows(self, start: int, end: int) -> PromptLogprobs:
        """The rows of the prompt tokens `start` to `end - 1`, which must be present."""
        first, last = start - self.start, end - self.start
        width = self.num_top
        return PromptLogprobs(
            start=start,
            logprobs=self.logprobs[first:last],
            ranks=self.ranks[first:last],
            num_top=width,
            top_token_ids=self.top_token_ids[first * width : last * width],
            top_logprobs=self.top_logprobs[first * width : last * width],
        )


class StepStatus(IntEnum):
    """How a step ended; numbers as in execution.proto."""

    OK = 1
    FAILED = 2
    SKIPPED = 3
    OUT_OF_MEMORY = 4
    INVALID_PLAN = 5


class SlotError(IntEnum):
    """Why one slot failed; numbers as in execution.proto."""

    UNSPECIFIED = 0
    """A reason that this scheduler does not know."""
    NON_FINITE_LOGITS = 1
    GRAMMAR = 2
    TRANSFER = 3
    NO_ALLOWED_TOKEN = 4


@dataclass(slots=True)
class StepResult:
    """The output of one step, in columns: for each slot that was scheduled to sample, its token or none.

    Never changed; not frozen, as `Sampling`.
    """

    step_id: int
    status: StepStatus = StepStatus.OK
    error_message: str = ""
    slots: Sequence[int] = ()
    num_tokens: Sequence[int] = ()
    """Number of tokens that each slot sampled; empty: one each."""
    token_ids: Sequence[int] = ()
    num_drafts: Sequence[int] = ()
    """Number of drafts that each slot had; empty: none."""
    num_accepted: Sequence[int] = ()
    """Number of them that each slot accepted; empty: none."""
    error_slots: Sequence[int] = ()
    errors: Sequence[SlotError] = ()
    """The reason for each entry of error_slots."""
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By slot, where the request wants logprobs: of each of its tokens."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By slot, where the request wants them: of the prompt tokens that this step's chunk predicts."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """By slot, for beams. These slots sample no token."""
    debug_digest: bytes = b""
    """Digest of the executor's slots after the step, if the plan requested it."""
    queue_ns: int = 0
    device_ns: int = 0
    sample_ns: int = 0
    moves_ns: int = 0
    """Time for block copies and swaps."""
    total_ns: int = 0
