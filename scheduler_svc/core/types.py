"""The types of the core: states, finish reasons, requests, executor limits, plans and results.

Per-token data travels in columns (parallel lists of ints), never as an object per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from scheduler_svc.core.grammar import Grammar

RequestKey = tuple[str, str]
"""Tenant and request id."""
BlockPairs = list[tuple[int, int]]
"""Block moves: (source, destination)."""


class SequenceState(Enum):
    """A sequence's state. Prefill and decode are not states: they follow from the token counts."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()

    # Enum hashes the name, in Python.
    __hash__ = object.__hash__


class FinishDetail(IntEnum):
    """Why a sample ended; numbers as in types.proto."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    MAX_MODEL_LEN = 5
    KV_CAPACITY = 6
    ABORTED = 7
    DEADLINE = 8
    NON_FINITE_LOGITS = 9
    EXECUTOR_ERROR = 10
    NO_ALLOWED_TOKEN = 11
    GRAMMAR = 12


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sample ended, and the stop token or stop string that it matched, if any."""

    detail: FinishDetail
    stop_token_id: int | None = None
    stop_string: str | None = None


SamplingValue = float | tuple[float, ...] | tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Sampling:
    """How an executor chooses tokens: SamplingParams resolved to numbers and token ids. Ranges as in types.proto.

    The core reads the fields that are named here. The others pass through it unread, in `values`. Never changed; not
    frozen, because constructing a frozen object takes three times as long.
    """

    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the sequence, EOS included unless it is ignored."""
    min_tokens: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    num_candidates: int = 0
    """Best next tokens returned in place of a sampled one, for beams; 0: sample, or of a beam what its search needs."""
    grammar: Grammar | None = None
    values: Mapping[str, SamplingValue] = field(default_factory=dict)
    """The other fields of SequenceSampling by name, where they are not off: numbers, lists of them, lists of words."""

    @property
    def num_values(self) -> int:
        """What it adds to a plan, in numbers."""
        if self.grammar is not None:
            return self.num_listed + self.grammar.num_values
        # Without another call for most requests: each that joins passes here.
        return self.num_listed if self.values else len(self.stop_token_ids)

    @property
    def num_listed(self) -> int:
        """Numbers in its lists: what a sequence with a source adds to a plan, as its grammar is the source's."""
        num_stop_ids = len(self.stop_token_ids)
        return num_stop_ids + sum(map(_num_listed, self.values.values())) if self.values else num_stop_ids


def _num_listed(value: SamplingValue) -> int:
    """Numbers in a list or in a list of lists; a number by itself counts as none."""
    if not isinstance(value, tuple):
        return 0
    first = value[0] if value else 0
    # A list of numbers may have 131,072 of them.
    return (
        sum(len(each) if isinstance(each, tuple) else 1 for each in value) if isinstance(first, tuple) else len(value)
    )


@dataclass(frozen=True, slots=True)
class BeamSpec:
    """Beam search as transformers defines it."""

    width: int
    """Number of beams, 2 or more."""
    length_penalty: float = 1.0
    """Exponent of the output's length, by which a beam's sum of logprobs is divided."""
    early_stopping: bool | None = False
    """True: done once `width` beams have ended; False: when a better one is unlikely; None ("never"): impossible."""


@dataclass(slots=True)
class RequestSpec:
    """A validated and tokenized request with a seed. Never changed; not frozen, as `Sampling`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None = None
    """Maximum number of output tokens; None: as many as max_model_len allows."""
    eos_token_ids: frozenset[int] = frozenset()
    """The stop ids of `sampling` that count as EOS."""
    num_samples: int = 1
    """Number of samples to draw; with beams, number of best beams to return, at most the beam width."""
    beams: BeamSpec | None = None
    """Beam search in place of sampling."""
    cache_salt: bytes = b""
    """Requests share blocks only if they have the same salt, and the same tenant or `shared_prefixes`."""
    uses_prefix_cache: bool = True
    """Whether the request may use and fill the prefix cache, where there is one."""
    priority: int = 0
    tenant: str = ""
    shared_prefixes: str = ""
    """Tenants with the same name here share blocks; empty: the tenant shares with no other."""
    expected_output_tokens: int | None = None
    """The client's estimate, used by orders that sort by length."""
    max_drafts: int | None = None
    """The most drafts of a sequence in one step; 0: no speculative decoding; None: as many as the executor allows."""
    adapter_index: int = 0
    """Its LoRA adapter; 0: none."""
    adapter_hash: bytes = b""
    """The content that its adapter must have, as in the process that began it; empty: any."""
    known_outputs: tuple[tuple[int, ...], ...] = ()
    """The output of each sample that an earlier process has generated, not that of beams; empty: none."""

    @property
    def key(self) -> RequestKey:
        """The request's unique key: request ids are scoped by tenant."""
        return self.tenant, self.request_id

    @property
    def num_sequences(self) -> int:
        """Number of sequences in its group: samples or beams."""
        return self.beams.width if self.beams else self.num_samples

    def length_limit(self, max_model_len: int) -> tuple[int, FinishDetail]:
        """The maximum number of tokens, prompt included, and the reason to finish there."""
        if self.max_tokens is not None and len(self.prompt_token_ids) + self.max_tokens <= max_model_len:
            return len(self.prompt_token_ids) + self.max_tokens, FinishDetail.MAX_TOKENS
        return max_model_len, FinishDetail.MAX_MODEL_LEN


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """The limits of one executor that its lane needs."""

    block_size: int
    num_blocks: int
    num_slots: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = 0.01
    num_host_blocks: int = 0
    """Number of blocks in the host pool, the destination of swap-outs."""
    shares_prefixes: bool = True
    """Whether a token's KV depends only on the tokens before it, so that requests may share blocks."""
    numerics: bytes = b""
    """Requests with output move only between executors with the same value; empty: no tokens are promised."""
    max_drafts: int = 0
    """The most drafts of a sequence in one step; 0: no speculative decoding."""
    adaptive_drafts: bool = False
    """Whether the number of drafts follows from what steps have cost and accepted; otherwise as many as fit."""
    max_loras: int = 0
    """The most distinct adapters of running groups; 0: no adapters."""
    max_cpu_loras: int = 0
    """The most loaded adapters."""
    grammar_engine: bytes = b""
    """What follows grammars in it: it runs those that were checked with the same. Empty: it has none."""
    lacks: frozenset[str] = frozenset()
    """Names of features that it lacks: see `core.placement.candidates`."""


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


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """What is known about the end of a session."""

    begun_step_id: int = 0
    """The newest step that the executor is known to have begun; 0: none."""
    failed_step_id: int = 0
    """The step that failed in an executor that is there to report it; 0: none."""
    executor_stopped: bool = False
    """Whether the executor ended the session because a signal stopped it: no request caused it."""


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """New tokens of one sample, its finish, or both."""

    key: RequestKey
    sample_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of the request's prompt; reported in order, each row once."""
    cumulative_logprob: float | None = None
    """Sum of a beam's logprobs, reported with its finish."""
