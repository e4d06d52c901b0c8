"""A plan in flight, and what it meant when it was made."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import StepPlan


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a sequence that does not decode with the cohort: of its prompt, a beam's, or what is computed again.

    A fork has none, and samples.
    """

    sequence: Sequence
    slot: int
    num_tokens: int
    context_len: int
    samples: bool


@dataclass(slots=True)
class PlannedStep:
    """A plan and what it meant when it was made: its result is read against this, never against the present.

    `preempted` and `retired` gave their blocks up before this step, `swapped_out` among the former kept them in the
    host pool, `swapped_in` have come back from there, `appended` got a block more.
    """

    plan: StepPlan
    planned_at: float
    decode_slots: list[int] = field(default_factory=list)
    """Slots of those that decode: one token each, and each samples."""
    chunks: list[Chunk] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[Sequence, range]] = field(default_factory=dict)
    """By slot: who asked for prompt logprobs, and of which prompt tokens this step gives them."""
    joined: list[Sequence] = field(default_factory=list)
    joined_slots: list[int] = field(default_factory=list)
    described: list[Sequence] = field(default_factory=list)
    """One for each admission of the plan: a sequence may join earlier, and a beam may be described again."""
    preempted: list[Sequence] = field(default_factory=list)
    swapped_out: list[Sequence] = field(default_factory=list)
    swapped_in: list[Sequence] = field(default_factory=list)
    retired: list[Sequence] = field(default_factory=list)
    appended: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.decode_slots) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampling_slots(self) -> list[int]:
        """The slots that sample, ascending."""
        sampling = [chunk.slot for chunk in self.chunks if chunk.samples]
        return sorted(self.decode_slots + sampling) if sampling else self.decode_slots

    @property
    def candidate_slots(self) -> list[int]:
        """The slots of beams whose candidates this step tells: they sample no token."""
        return [chunk.slot for chunk in self.chunks if chunk.samples and chunk.sequence.is_beam]

    @property
    def slots(self) -> list[int]:
        """All slots that compute or sample."""
        return [*self.decode_slots, *(chunk.slot for chunk in self.chunks)]
