"""The result of a step: tokens, logprobs and errors by batch slot, in columns, as in execution.proto.

An executor makes columns that are buffers; the scheduler reads them off the wire as lists. Logprobs are buffers on both
sides: Python numbers would take eight times the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one token: logprob and rank (from 1) of the chosen id, and the top ids with theirs, best first."""

    logprob: float
    rank: int
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best next tokens of one slot, best first, ties to the lowest id, with their scores; [1 to num_candidates]."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class LogprobColumns(NamedTuple):
    """Logprobs of consecutive tokens of a sequence, in columns, as LogprobColumns in types.proto.

    A tuple, as a step may have hundreds: a frozen dataclass takes four times as long to make.
    """

    start: int
    """The first token's index in the sequence, prompt included."""
    logprobs: Sequence[float]
    """[num_tokens] of the chosen ids."""
    ranks: Sequence[int]
    """[num_tokens], from 1."""
    num_top: int
    top_token_ids: Sequence[int]
    """[num_tokens * num_top], best first."""
    top_logprobs: Sequence[float]

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + len(self.logprobs)

    def rows(self, start: int, end: int) -> LogprobColumns:
        """The rows of the tokens `start` to `end - 1`, which must be present."""
        first, last = start - self.start, end - self.start
        width = self.num_top
        return LogprobColumns(
            start=start,
            logprobs=self.logprobs[first:last],
            ranks=self.ranks[first:last],
            num_top=width,
            top_token_ids=self.top_token_ids[first * width : last * width],
            top_logprobs=self.top_logprobs[first * width : last * width],
        )

    def tokens(self) -> tuple[TokenLogprobs, ...]:
        """The same, token by token."""
        width = self.num_top
        if len(self.logprobs) == 1:
            return (TokenLogprobs(self.logprobs[0], self.ranks[0], self.top_token_ids, self.top_logprobs),)
        return tuple(
            TokenLogprobs(
                self.logprobs[index],
                self.ranks[index],
                self.top_token_ids[index * width : (index + 1) * width],
                self.top_logprobs[index * width : (index + 1) * width],
            )
            for index in range(len(self.logprobs))
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


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Durations in nanoseconds."""

    queue_ns: int = 0
    device_ns: int = 0
    sample_ns: int = 0
    total_ns: int = 0
    moves_ns: int = 0
    """Block copies and swaps; 0 if there were none."""


_NO_TIMINGS = StepTimings()


@dataclass(slots=True)
class StepResult:
    """The output of one step, in columns: for each slot that was scheduled to sample, its tokens or none.

    Slots are ascending. Never changed; not frozen, as `SequenceSampling`. Fields with the name of a field on the wire
    go there and come from there without another line.
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
    logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    """By slot, where the request wants logprobs: of its tokens."""
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    """By slot, where the request wants them: of the prompt tokens that this step's chunk predicts."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """By slot, for beams. These slots sample no token."""
    saved_slots: Sequence[int] = ()
    """Slots whose armed copies of recurrent states the step made, repeated for several positions."""
    saved_positions: Sequence[int] = ()
    """The positions of these copies."""
    timings: StepTimings = _NO_TIMINGS
    debug_digest: bytes = b""
    """Digest of the executor's slots after the step, if the plan requested it."""
    num_sequences: int = 0
    """In executors: the number of sequences that computed something, for the process's metrics, as the next one."""
    num_computed: int = 0
    """In executors: the number of tokens that they computed."""
