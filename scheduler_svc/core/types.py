"""The types of the core: states, finish reasons, requests and executor limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.kv_groups import GroupSizes, KVGroup, group_sizes

RequestKey = tuple[str, str]
"""Tenant and request id."""


class SequenceState(Enum):
    """A sequence's state. Prefill and decode are not states: they follow from the token counts."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()

    # Enum hashes the name, in Python.
    __hash__ = object.__hash__


NEXT_STATES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED}),
    SequenceState.SWAPPED: frozenset({SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}
"""The states that each may become."""


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


CUT_OFF = frozenset(
    {
        FinishDetail.ABORTED,
        FinishDetail.DEADLINE,
        FinishDetail.NON_FINITE_LOGITS,
        FinishDetail.EXECUTOR_ERROR,
        FinishDetail.NO_ALLOWED_TOKEN,
        FinishDetail.GRAMMAR,
    }
)
"""How samples end that fail or are aborted."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sample ended, and the stop token or stop string that it matched, if any."""

    detail: FinishDetail
    stop_token_id: int | None = None
    stop_string: str | None = None


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
    """A validated and tokenized request with a seed. Never changed; not frozen, as `SequenceSampling`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SequenceSampling
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
    """Pages of the device pool: without `kv_groups` a block is a page."""
    num_slots: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = 0.01
    num_host_blocks: int = 0
    """Number of pages in the host pool, the destination of swap-outs."""
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
    """The library that follows grammars in it: it runs only grammars checked with the same. Empty: it has none."""
    lacks: frozenset[str] = frozenset()
    """Names of features that it lacks: see `core.placement.candidates`."""
    kv_groups: tuple[KVGroup, ...] = ()
    """Its KV groups; empty: one of all layers without a window, with one page a block."""
    pages_per_state: int = 0
    """Pages of the recurrent state of a sequence; 0: there is none."""
    group_sizes: GroupSizes | None = field(init=False, repr=False, compare=False)
    """What its groups take; None: a block is a page. It is made once, as each request asks."""

    def __post_init__(self) -> None:
        sizes = group_sizes(
            self.kv_groups, self.block_size, self.max_num_batched_tokens, self.max_drafts, self.pages_per_state
        )
        object.__setattr__(self, "group_sizes", sizes)

    @property
    def page_groups(self) -> tuple[KVGroup, ...]:
        """Its KV groups; none where a block is a page and there is no state."""
        return () if self.group_sizes is None else self.kv_groups or (KVGroup(0),)

    def footprint(self, num_tokens: int, chunk: int = 1) -> int:
        """Pages that a sequence of so many tokens needs to compute chunks of so many."""
        num_blocks, sizes = -(-num_tokens // self.block_size), self.group_sizes
        return num_blocks if sizes is None else sizes.num_pages(num_blocks, chunk)


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """What is known about the end of a session."""

    begun_step_id: int = 0
    """The newest step that the executor is known to have begun; 0: none."""
    failed_step_id: int = 0
    """The step that failed in an executor that is there to report it; 0: none."""
    executor_stopped: bool = False
    """Whether the executor ended the session because a signal stopped it: no request caused it."""
