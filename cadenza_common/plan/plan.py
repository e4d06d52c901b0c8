"""The plan of a step: what changes for an executor, in columns, as in execution.proto.

The scheduler fills columns that are lists; an executor reads them off the wire as buffers, of which numpy makes arrays
without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field

from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.plan.sampling import SequenceSampling

KV_GROUP = "kv_group"
"""In the names of `StepPlan.reserved`: a KV group other than 0, which only executors with several groups have."""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A slot from which an admitted sequence takes its first tokens and blocks: it has the same prompt."""

    slot: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class GroupTable:
    """A sequence's blocks in a KV group other than 0: the pages of each block, in the order of positions."""

    kv_group: int
    first_block: int
    """The block that the first pages are of, counted from position 0."""
    page_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class GroupAppends:
    """Blocks appended to the tables of a KV group other than 0: page_ids[i] goes to the table of slots[i]."""

    kv_group: int
    slots: Sequence[int]
    page_ids: Sequence[int]


@dataclass(slots=True)
class AdmittedSequence:
    """The full description of a sequence, sent to the executor once. Never changed, as its plan."""

    slot: int
    token_ids: Sequence[int]
    """All of its tokens; with a source, those after the source's."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: Sequence[int]
    """The pages of all of its blocks in KV group 0; on the wire and in executors, with a source, those after the
    source's."""
    sampling: SequenceSampling
    sample_index: int = 0
    held: bool = False
    """Not included in decode_ready until the plan resumes it."""
    source: PrefixSource | None = None
    max_drafts: int = 0
    """The most drafts in one step."""
    max_len: int = 0
    """With drafts: the number of tokens at which the executor stops it; 0: max_model_len."""
    adapter_index: int = 0
    """Its LoRA adapter; 0: none."""
    draft_scope: int = 0
    """With drafts: sequences with the same number may get drafts from each other's tokens; 0: from its own only."""
    grammar_turn: int = 0
    """With a grammar: its tenant's number, whose turn it takes to be compiled; 0: there are no tenants."""
    grammar: GrammarSpec | None = None
    """In executors: the constraint on its output, with a source the source's. The scheduler's is in `sampling`."""
    first_block: int = 0
    """The block that the first of `block_ids` are of: above 0 only where KV group 0 has a window."""
    group_tables: Sequence[GroupTable] = ()
    """Its blocks in the other KV groups."""
    state_pages: Sequence[int] = ()
    """The pages of its recurrent state, [pages_per_state], its own also with a source; empty without states."""


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Moves of blocks: block i moves from sources[i] to destinations[i]."""

    sources: Sequence[int] = ()
    destinations: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.sources, self.destinations, strict=True)


_NO_MOVES = BlockMoves()


@dataclass(frozen=True, slots=True)
class StateSaves:
    """Copies of slots' recurrent states to make when they stand at positions; those of a slot are ascending."""

    slots: Sequence[int] = ()
    positions: Sequence[int] = ()
    page_ids: Sequence[int] = ()
    """[len(slots) * pages_per_state]."""

    def __len__(self) -> int:
        return len(self.slots)


_NO_SAVES = StateSaves()


@dataclass(slots=True)
class StepPlan:
    """The changes for one step; execution.proto states their order. Never changed after planning.

    Fields with the name of a field on the wire go there and come from there without another line; the others are in
    the table of `plan_wire.columns`.
    """

    step_id: int
    executor_id: int = 0
    """In the scheduler."""
    released_slots: MutableSequence[int] = field(default_factory=list)
    swap_out: BlockMoves = _NO_MOVES
    """From the device pool to the host pool."""
    copies: BlockMoves = _NO_MOVES
    """In the device pool; no block is both source and destination."""
    swap_in: BlockMoves = _NO_MOVES
    """From the host pool to the device pool."""
    admitted: list[AdmittedSequence] = field(default_factory=list)
    append_slots: MutableSequence[int] = field(default_factory=list)
    append_block_ids: MutableSequence[int] = field(default_factory=list)
    """In KV group 0, a slot for each page."""
    group_appends: Sequence[GroupAppends] = ()
    """In the other KV groups."""
    held_slots: MutableSequence[int] = field(default_factory=list)
    resumed_slots: MutableSequence[int] = field(default_factory=list)
    given_slots: MutableSequence[int] = field(default_factory=list)
    given_token_ids: MutableSequence[int] = field(default_factory=list)
    decode_ready: bool = False
    max_drafts: int = 0
    """The most drafts of each slot that decode_ready schedules."""
    scheduled_slots: MutableSequence[int] = field(default_factory=list)
    scheduled_num_tokens: MutableSequence[int] = field(default_factory=list)
    scheduled_samples: MutableSequence[int] = field(default_factory=list)
    """Flags."""
    fork_source_slots: MutableSequence[int] = field(default_factory=list)
    fork_slots: MutableSequence[int] = field(default_factory=list)
    state_saves: StateSaves = _NO_SAVES
    announces_start: bool = False
    """Request a heartbeat that names this step before it runs."""
    debug_digest: bool = False
    """Request a digest of the executor's slots after this step."""
    epoch: int = 0
    """In executors: the session's. The scheduler's plan gets it when it is sent."""
    reserved: tuple[str, ...] = ()
    """In executors: names of what is there and not supported, so that a refusal can name it."""
    wire: Callable[[], bytes] = field(default=bytes, repr=False, compare=False)
    """In executors: returns the message that it was read from, for other ranks."""
