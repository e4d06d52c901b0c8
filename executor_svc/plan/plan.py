"""Step plans and step results: execution.proto as plain data, without its stubs.

Per-token data is in numpy columns. Enums have the protocol's numbers. Fields that no executor supports yet
(transfers, embeddings, ...) are listed by name in `reserved`, so that an executor can refuse them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from cadenza_common.grammar.spec import GrammarSpec
from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray, no_bools, no_ints
from executor_svc.plan.sampling import SequenceSampling


class InvalidPlan(ValueError):
    """The plan contradicts the executor's state or limits; the message gives the contradiction."""


class StepStatus(IntEnum):
    """The status of a step: `cadenza.v1.StepStatus`."""

    OK = 1
    FAILED = 2
    SKIPPED = 3
    OUT_OF_MEMORY = 4
    INVALID_PLAN = 5


class SlotError(IntEnum):
    """The error of a slot: `cadenza.v1.SlotError`."""

    NON_FINITE_LOGITS = 1
    GRAMMAR = 2
    TRANSFER = 3
    NO_ALLOWED_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """The executor's capacity, and the limits of one plan."""

    num_slots: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_inflight_plans: int
    max_drafts: int = 0
    """The most drafts of a slot in one step; 0: no speculative decoding."""
    max_loras: int = 0
    """The most distinct adapters of admitted slots; 0: no adapters."""
    max_cpu_loras: int = 0
    """The most loaded adapters."""
    has_grammars: bool = False
    """Whether sequences may have grammars."""
    adaptive_drafts: bool = False
    """Whether the scheduler chooses the number of drafts by what steps have cost and accepted."""

    @property
    def max_blocks_per_seq(self) -> int:
        """The number of block table entries of a sequence of max_model_len tokens."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A slot from which an admitted sequence takes its first token ids and blocks."""

    slot: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AdmittedSequence:
    """A sequence's admission: all that the executor needs for it."""

    slot: int
    token_ids: IntArray
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: IntArray
    sampling: SequenceSampling
    held: bool = False
    adapter_index: int = 0
    source: PrefixSource | None = None
    """The slot with the tokens and blocks before these; None: token_ids and block_ids are complete."""
    max_drafts: int = 0
    """The most drafts in one step."""
    max_len: int = 0
    """With drafts: the number of tokens at which the sequence stops; 0: max_model_len."""
    draft_scope: int = 0
    """Sequences with the same number may get drafts from each other's tokens; 0: from its own only."""
    grammar: GrammarSpec | None = None
    """The constraint on its output; with a source, the source's counts."""
    grammar_turn: int = 0
    """Whose turn the grammar takes to be compiled."""


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Moves of blocks: block i moves from sources[i] to destinations[i]; [n] each."""

    sources: IntArray = field(default_factory=no_ints)
    destinations: IntArray = field(default_factory=no_ints)


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """A value for each of n slots: a block to append, a given token, or a fork's source; [n] each."""

    slots: IntArray = field(default_factory=no_ints)
    values: IntArray = field(default_factory=no_ints)


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Slots with an explicit number of tokens; [n] each."""

    slots: IntArray = field(default_factory=no_ints)
    num_tokens: IntArray = field(default_factory=no_ints)
    samples: BoolArray = field(default_factory=no_bools)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All changes for one step; execution.proto states the order in which its parts take effect."""

    step_id: int
    epoch: int
    released_slots: IntArray = field(default_factory=no_ints)
    swap_out: BlockMoves = BlockMoves()
    copies: BlockMoves = BlockMoves()
    swap_in: BlockMoves = BlockMoves()
    admitted: tuple[AdmittedSequence, ...] = ()
    appends: SlotColumns = SlotColumns()
    held_slots: IntArray = field(default_factory=no_ints)
    resumed_slots: IntArray = field(default_factory=no_ints)
    given: SlotColumns = SlotColumns()
    decode_ready: bool = False
    max_drafts: int = 0
    scheduled: ScheduledTokens = ScheduledTokens()
    forks: SlotColumns = SlotColumns()
    debug_digest: bool = False
    # Whether a heartbeat names this step before it runs.
    announces_start: bool = False
    reserved: tuple[str, ...] = ()
    wire: Callable[[], bytes] = field(default=bytes, repr=False, compare=False)
    """Returns the message that it was read from, for other ranks."""


@dataclass(frozen=True, slots=True)
class SlotLogprobs:
    """Logprobs of one slot's tokens; `start` is the index of the first in the sequence, prompt included."""

    slot: int
    start: int
    chosen_logprobs: FloatArray
    """[num_tokens] float32."""
    chosen_ranks: IntArray
    """[num_tokens], from 1."""
    num_top: int
    top_token_ids: IntArray
    """[num_tokens * num_top], best first."""
    top_logprobs: FloatArray
    """[num_tokens * num_top] float32."""


@dataclass(frozen=True, slots=True)
class SlotCandidates:
    """The best next tokens of one slot that requested candidates."""

    slot: int
    token_ids: IntArray
    """[1 to num_candidates], best first, ties to the lowest id."""
    logprobs: FloatArray
    """The same shape."""


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Durations in nanoseconds."""

    queue_ns: int = 0
    device_ns: int = 0
    sample_ns: int = 0
    total_ns: int = 0
    moves_ns: int = 0
    """Block copies and swaps; 0 if there were none."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, in columns, slots ascending."""

    step_id: int
    status: StepStatus
    error_message: str = ""
    slots: IntArray = field(default_factory=no_ints)
    """[n] slots that the plan scheduled for sampling."""
    num_tokens: IntArray = field(default_factory=no_ints)
    """[n] number of tokens that each slot sampled; empty: one each."""
    num_drafts: IntArray = field(default_factory=no_ints)
    """[n] number of drafts that each slot had; empty: none."""
    num_accepted: IntArray = field(default_factory=no_ints)
    """[n] number of drafts that each slot accepted; empty: none."""
    token_ids: IntArray = field(default_factory=no_ints)
    error_slots: IntArray = field(default_factory=no_ints)
    errors: tuple[SlotError, ...] = ()
    logprobs: tuple[SlotLogprobs, ...] = ()
    """Logprobs of sampled tokens, for slots that requested them."""
    prompt_logprobs: tuple[SlotLogprobs, ...] = ()
    """Logprobs of the prompt tokens that the step's chunks predict, for slots that requested them."""
    candidates: tuple[SlotCandidates, ...] = ()
    """Candidates of slots that requested them; these sample no token."""
    timings: StepTimings = StepTimings()
    debug_digest: bytes = b""
    num_sequences: int = 0
    """Number of sequences that computed something; for the metrics of this process, as the next one."""
    num_computed: int = 0
    """Number of tokens that they computed."""
