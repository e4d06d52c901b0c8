"""The plan of a step, as the core makes it: what changes for the executor, in columns."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.types import BlockPairs, Sampling


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A slot from which an admitted sequence takes its first tokens and blocks: it has the same prompt."""

    slot: int
    num_tokens: int
    num_blocks: int


@dataclass(slots=True)
class AdmittedSequence:
    """The full description of a sequence, sent to the executor once. Never changed, as its plan."""

    slot: int
    token_ids: tuple[int, ...]
    """All of its tokens; with a source, those after the source's."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    """All of its blocks; with a source, the first ones are not sent."""
    sampling: Sampling
    sample_index: int
    held: bool = False
    """Not included in decode_ready until the plan resumes it."""
    source: PrefixSource | None = None
    max_drafts: int = 0
    """The most drafts in one step."""
    max_len: int = 0
    """With drafts: the number of tokens at which the executor stops it."""
    adapter_index: int = 0
    """Its LoRA adapter; 0: none."""
    draft_scope: int = 0
    """With drafts: sequences with the same number may get drafts from each other's tokens; 0: from its own only."""
    grammar_turn: int = 0
    """With a grammar: its tenant's number, whose turn it takes to be compiled; 0: there are no tenants."""


@dataclass(slots=True)
class StepPlan:
    """The changes for one step, in columns, as in execution.proto. Never changed after planning."""

    step_id: int
    executor_id: int
    released_slots: list[int] = field(default_factory=list)
    swapped_out: BlockPairs = field(default_factory=list)
    """(device block, host block)."""
    copied: BlockPairs = field(default_factory=list)
    """(source, destination), both in the device pool; no block is both."""
    swapped_in: BlockPairs = field(default_factory=list)
    """(host block, device block)."""
    admitted: list[AdmittedSequence] = field(default_factory=list)
    append_slots: list[int] = field(default_factory=list)
    append_block_ids: list[int] = field(default_factory=list)
    held_slots: list[int] = field(default_factory=list)
    resumed_slots: list[int] = field(default_factory=list)
    given_slots: list[int] = field(default_factory=list)
    given_token_ids: list[int] = field(default_factory=list)
    decode_ready: bool = False
    max_drafts: int = 0
    """The most drafts of each slot that decode_ready schedules."""
    scheduled_slots: list[int] = field(default_factory=list)
    scheduled_num_tokens: list[int] = field(default_factory=list)
    scheduled_samples: list[bool] = field(default_factory=list)
    fork_source_slots: list[int] = field(default_factory=list)
    fork_slots: list[int] = field(default_factory=list)
    announces_start: bool = False
    """Request a heartbeat that names this step before it runs."""
    debug_digest: bool = False
    """Request a digest of the executor's slots after this step."""
