"""A plan in flight, with the sequences that it refers to."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.memory.block_moves import NO_MOVES, Moves
from scheduler_svc.core.sequences.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Tokens of a sequence outside the decode batch: of a prompt, of a beam, or recomputed ones.

    A fork has 0 tokens and samples.
    """

    sequence: Sequence
    slot: int
    num_tokens: int
    context_len: int
    samples: bool
    block_ids: Ids[int] = ()
    """The blocks that it writes to."""
    first_offset: int = 0
    """The first position in the first of these blocks that it writes to."""


@dataclass(slots=True)
class PlannedStep:
    """A plan and the sequences behind its slots: its result is applied to these, never to the slots' current holders.

    `preempted` and `retired` freed their blocks before this step; `swapped_out`, a part of `preempted`, moved them to
    the host pool; `swapped_in` moved them back; `appended` got one more block each.
    """

    plan: StepPlan
    planned_at: float
    first_node: int = 0
    """The first prefix cache node that may hold KV of this step or a later one."""
    first_change: int = 0
    """Number of changes that the prefix cache had noted before this step was planned: those are of earlier steps."""
    is_trial: bool = False
    """Whether it computes suspected positions, and nothing else."""
    decode_slots: list[int] = field(default_factory=list)
    """Slots of the decode batch: each computes one token and samples."""
    num_drafting: int = 0
    """Number of these that may have drafts, and of sequences that begin with one token as if they were of these."""
    chunks: list[Chunk] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[Sequence, range]] = field(default_factory=dict)
    """By slot: the sequence with requested prompt logprobs, and the prompt tokens that this step gives them for."""
    joined: list[Sequence] = field(default_factory=list)
    joined_slots: list[int] = field(default_factory=list)
    described: list[Sequence] = field(default_factory=list)
    """One for each entry of plan.admitted: a sequence may join earlier, and a beam may be described again."""
    preempted: list[Sequence] = field(default_factory=list)
    swapped_out: list[Sequence] = field(default_factory=list)
    swapped_in: list[Sequence] = field(default_factory=list)
    retired: list[Sequence] = field(default_factory=list)
    appended: list[tuple[Sequence, int]] = field(default_factory=list)
    """With KV groups an entry for each page."""
    moves: Moves = NO_MOVES
    """The moves of the plan by block: in the plan they are by page."""
    window_appends: dict[int, list[tuple[Sequence, int, int]]] = field(default_factory=dict)
    """By KV group other than 0: sequences with their slots, and the pages appended to their tables."""
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    """With states: sources and samples that begin with this step; the next plan copies the sources' states."""
    saves: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """Copies of states that this plan arms: slot, position and pages of each."""
    saved: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Copies that its result has named: position and pages; without pages: given up before."""

    num_planned_tokens: int | None = None
    """`total_tokens`, kept when the step is planned; None before."""

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        if self.num_planned_tokens is not None:
            return self.num_planned_tokens
        num_decoded = len(self.decode_slots)
        return num_decoded + sum(chunk.num_tokens for chunk in self.chunks) if self.chunks else num_decoded

    @property
    def most_tokens(self) -> int:
        """Tokens computed in this step if every sequence has as many drafts as the plan allows."""
        return self.total_tokens + self.plan.max_drafts * self.num_drafting

    @property
    def may_have_drafts(self) -> bool:
        """Whether slots may have drafts in this step, and so several tokens."""
        return self.plan.max_drafts > 0

    @property
    def has_first_tokens(self) -> bool:
        """Whether a prompt ends in this step, or a sample begins."""
        return any(chunk.samples for chunk in self.chunks)

    @property
    def sampling_slots(self) -> list[int]:
        """The slots that sample, ascending."""
        sampling = [chunk.slot for chunk in self.chunks if chunk.samples]
        return sorted(self.decode_slots + sampling) if sampling else self.decode_slots

    @property
    def candidate_slots(self) -> list[int]:
        """The slots of beams for which this step returns candidates; they sample no token."""
        return [chunk.slot for chunk in self.chunks if chunk.samples and chunk.sequence.is_beam]

    @property
    def slots(self) -> list[int]:
        """All slots that compute or sample."""
        return [*self.decode_slots, *(chunk.slot for chunk in self.chunks)]
