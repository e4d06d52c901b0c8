"""The words of the core: states, reasons, what a request asks for, what an executor can hold, plans and results.

Per-token data travels in columns (parallel lists of ints), never as an object per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

RequestKey = tuple[str, str]
"""Tenant and request id."""


class SequenceState(Enum):
    """Where a sequence is. Prefill and decode are no states: they follow from the token counts."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


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


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sample ended, and the stop token or string that was matched, if one was."""

    detail: FinishDetail
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an executor chooses tokens: SamplingParams resolved to numbers and token ids. Ranges as in types.proto."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the sequence, EOS included unless it is ignored."""
    min_tokens: int = 0
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request as the core takes it: validated, tokenized, seeded."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None = None
    """Most output tokens; None: as many as max_model_len allows."""
    eos_token_ids: frozenset[int] = frozenset()
    """Which of the sampling's stop ids count as EOS."""
    num_samples: int = 1
    priority: int = 0
    tenant: str = ""

    @property
    def key(self) -> RequestKey:
        """What the request is known by: ids are scoped by tenant."""
        return self.tenant, self.request_id


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """What one executor can hold, as its lane needs it."""

    block_size: int
    num_blocks: int
    num_slots: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = 0.01


@dataclass(frozen=True, slots=True)
class AdmittedSequence:
    """All that an executor must be told of a sequence, once."""

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    sampling: Sampling
    sample_index: int


@dataclass(slots=True)
class StepPlan:
    """What changes for one step, in columns, as execution.proto says. Made once, then never changed."""

    step_id: int
    executor_id: int
    released_slots: list[int] = field(default_factory=list)
    admitted: list[AdmittedSequence] = field(default_factory=list)
    append_slots: list[int] = field(default_factory=list)
    append_block_ids: list[int] = field(default_factory=list)
    held_slots: list[int] = field(default_factory=list)
    resumed_slots: list[int] = field(default_factory=list)
    decode_ready: bool = False
    scheduled_slots: list[int] = field(default_factory=list)
    scheduled_num_tokens: list[int] = field(default_factory=list)
    scheduled_samples: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one token: of the chosen one, its rank from 1, and the most likely ids with theirs, best first."""

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class StepStatus(IntEnum):
    """How a step ended; numbers as in execution.proto."""

    OK = 1
    FAILED = 2
    SKIPPED = 3
    OUT_OF_MEMORY = 4
    INVALID_PLAN = 5


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made, in columns: for each slot that was to sample, its token or none."""

    step_id: int
    status: StepStatus = StepStatus.OK
    error_message: str = ""
    slots: Sequence[int] = ()
    num_tokens: Sequence[int] = ()
    """Tokens that each slot sampled; empty: one each."""
    token_ids: Sequence[int] = ()
    error_slots: Sequence[int] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By slot, for those that asked."""
    queue_ns: int = 0
    device_ns: int = 0
    sample_ns: int = 0
    total_ns: int = 0


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """New tokens of one sample, or its end, or both: what `apply_result` and the others tell the engine."""

    key: RequestKey
    sample_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
