"""The engine's interfaces to executors, text streams and the front; free of gRPC and tokenizer libraries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cadenza_common.plan.memory import MemoryPart
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.telemetry.trace_context import TraceContext
from scheduler_svc.core.adapters.events import AdapterCommands, AdapterLoaded, AdapterUnloaded
from scheduler_svc.core.kv_groups import KVGroup, group_sizes
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.plan_loop.gauges import Load


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """An executor's description: model, cache and limits."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    num_parameters: int
    tokenizer: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    num_slots: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    max_inflight_plans: int
    device: str
    incarnation: int
    fingerprint: bytes
    """The serialized NumericsFingerprint, opaque to the engine."""
    is_exact: bool = True
    """Whether its numerics are exact: equal fingerprints then mean equal tokens."""
    numerics: tuple[tuple[str, str], ...] = ()
    """The parts of the fingerprint as (name, value), to say what differs."""
    model_type: str = ""
    """The kind of model by its config.json; empty: none."""
    media_token_ids: frozenset[int] = frozenset()
    """Those that stand for images, audio or video in prompts, which it does not take."""
    default_sampling: bytes = b""
    """Sampling parameters that the model's files suggest, as a serialized SamplingParams, opaque to the engine."""
    gives_prompt_logprobs: bool = True
    has_logits_processors: bool = True
    """Whether it supports penalties, logit bias, allowed tokens and bad words."""
    bytes_per_block: int = 0
    """Bytes of KV per block, over all layers, or with `kv_groups` per page; 0: unknown."""
    kv_groups: tuple[KVGroup, ...] = ()
    """Its KV groups; empty: one of all layers without a window, with one page a block."""
    pages_per_state: int = 0
    """Pages of the recurrent state of a sequence; 0: there is none."""
    shares_prefixes: bool = True
    """Whether a token's KV depends only on the tokens before it."""
    can_copy: bool = True
    """Whether it can copy blocks within the device pool."""
    can_swap: bool = True
    """Whether it can swap blocks to and from the host pool."""
    can_fork: bool = True
    """Whether several slots can sample from one row of logits."""
    gives_candidates: bool = True
    """Whether it returns candidate tokens and accepts given tokens, for beam search."""
    gives_debug_digest: bool = True
    max_loras: int = 0
    """The most distinct adapters of admitted slots; 0: no adapters."""
    max_cpu_loras: int = 0
    grammar_engine: bytes = b""
    """What follows grammars (`GrammarEngine.key`); empty: nothing does."""
    max_drafts: int = 0
    """The most drafts of a sequence in one step; 0: no speculative decoding."""
    adaptive_drafts: bool = False
    """Whether the core chooses their number by what steps have cost and accepted."""
    memory: tuple[MemoryPart, ...] = ()
    """What it takes of a GPU's memory; of a CPU nothing."""

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens of one sequence whose KV the device pool holds; with KV groups at most max_model_len."""
        sizes = group_sizes(
            self.kv_groups, self.block_size, self.max_num_batched_tokens, pages_per_state=self.pages_per_state
        )
        if sizes is None:
            return self.num_device_blocks * self.block_size
        return sizes.capacity(self.num_device_blocks, self.max_model_len)


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The executor's response to OpenSession."""

    incarnation: int
    last_completed_step_id: int
    sole_since_epoch: int = 0
    """The epoch since which only this scheduler has had sessions with the incarnation; 0: unknown."""
    adapters: tuple[AdapterLoaded, ...] = ()
    """The adapters that the executor has loaded."""


class ExecutorLostError(Exception):
    """The plan stream to an executor broke or was rejected; the message has the reason."""


class ExecutorStoppedError(ExecutorLostError):
    """A signal stopped the executor, and it ended the session: no plan caused it, and another executor may come."""


class ExecutorFencedError(ExecutorLostError):
    """Another scheduler, or a newer process of this one, has the executor: this one must not use it."""


class StaleEpochError(ExecutorLostError):
    """The executor refused the epoch of an opening; it names the smallest one that it accepts."""

    def __init__(self, message: str, next_epoch: int) -> None:
        super().__init__(message)
        self.next_epoch = next_epoch


class ExecutorHeldError(ExecutorLostError):
    """Another scheduler holds the executor, dead or alive."""

    def __init__(self, message: str, silent_s: float) -> None:
        """silent_s: seconds since the executor received that scheduler's last message."""
        super().__init__(message)
        self.silent_s = silent_s


class PlanStream(Protocol):
    """One session with an executor."""

    opened: SessionOpened

    @property
    def begun_step_id(self) -> int:
        """The newest step that the executor is known to have begun, by a heartbeat or a result; 0: none."""

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the executor's process in bytes, as last reported; 0: unknown."""

    async def send(self, plan: StepPlan) -> None:
        """Send the next plan; raises ExecutorLostError."""

    async def send_adapters(self, commands: AdapterCommands) -> None:
        """Send loads and unloads of adapters, after the plans so far; raises ExecutorLostError."""

    def results(self) -> AsyncIterator[StepResult | AdapterLoaded | AdapterUnloaded]:
        """Results in plan order, and answers about adapters; raises ExecutorLostError when the stream ends."""

    async def close(self) -> None:
        """End the session; safe to call twice."""


class ExecutorPort(Protocol):
    """The engine's interface to an executor."""

    target: str

    async def describe(self) -> ModelDescription:
        """Wait until the executor answers, and return its description."""

    async def open(self, epoch: int) -> PlanStream:
        """Open a session; raises ExecutorLostError, StaleEpochError, ExecutorHeldError, ExecutorFencedError."""

    async def aclose(self) -> None:
        """Close the connection: the executor is not used any more."""


Connect = Callable[[int, str], ExecutorPort]
"""Gives the port of a new executor by its index and its address; raises ValueError for a bad address."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found."""

    stop_string: str
    num_tokens: int
    """Number of the sample's tokens that are kept, including the one that completed the match."""


class TextStream(Protocol):
    """Detokenizes one sample incrementally."""

    text: str
    """Final text: without an incomplete character or a possible start of a stop string at its end."""
    text_ends: list[int]
    """text_ends[i]: length of `text` (code points) after i + 1 tokens; never decreases."""
    token_ends: list[int]
    """As `text_ends`, but with text that is held back as a possible start of a stop string; never decreases."""

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> StopMatch | None:
        """Add tokens; with ends_with_stop_token the last one adds no text unless stop strings are included."""

    def finish(self) -> None:
        """Release text that was held back, after the last token; nothing after a stop string."""

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, for logprobs."""

    def token_bytes(self, token_id: int) -> bytes:
        """Its bytes, if its text is not its own, as that of a part of a character; nothing: its text's."""


@dataclass(frozen=True, slots=True)
class BestOf:
    """More samples are drawn than returned: the client gets those with the highest cumulative logprobs."""

    num_returned: int
    returns_logprobs: bool
    """Whether the client gets the tokens' logprobs too; otherwise they only rank the samples."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request from the front."""

    spec: RequestSpec
    make_text: Callable[[], TextStream] | None = None
    """Creates the text stream of a sample; None: token ids only."""
    deadline: float | None = None
    """Seconds on the engine's clock (Clock.monotonic); None: none."""
    body_digest: bytes = b""
    """SHA-256 of the request's body: same id and same digest is the same request."""
    body: bytes = b""
    """The request's body as it came, for the journal."""
    resume_grace_s: float = 0.0
    best_of: BestOf | None = None
    """None: all samples are returned, as they are generated."""
    model_number: int | None = None
    """The number of the description (`ServedModel.number`) that it was checked against; None: the present one."""
    adapter: str = ""
    """Name of its LoRA adapter; empty: none. The engine finds its index."""
    trace: TraceContext | None = None
    """The caller's span; None: it has none."""


@dataclass(slots=True)
class RequestTimes:
    """Nanoseconds on the engine's clock; 0: not reached yet."""

    arrival_ns: int = 0
    first_plan_ns: int = 0
    first_token_ns: int = 0
    end_ns: int = 0


@dataclass(slots=True)
class RequestCounts:
    """Counts of one request."""

    num_cached_tokens: int = 0
    num_preemptions: int = 0


class BlockTableChange(NamedTuple):
    """A change of a sequence's block table; names as in BlockTableChange of admin.proto."""

    sequence_id: int
    appended: Sequence[int] = ()
    cleared: bool = False
    kv_group: int = 0
    first_block: int = 0
    state_pages: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One executed step, in columns; see StepRecord in admin.proto."""

    step_id: int
    executor_id: int
    planned_ns: int
    applied_ns: int
    result: StepResult
    joined: Sequence[tuple[int, str, int, int, int]] = ()
    """(sequence_id, request_id, sample_index, num_prompt_tokens, slot)."""
    sequence_ids: Sequence[int] = ()
    num_tokens: Sequence[int] = ()
    context_lens: Sequence[int] = ()
    num_sampled: Sequence[int] = ()
    num_drafts: Sequence[int] = ()
    """[n] as num_accepted_drafts; empty: nobody had drafts."""
    num_accepted_drafts: Sequence[int] = ()
    left: Sequence[tuple[int, int]] = ()
    """(sequence_id, num_output_tokens)."""
    preempted_ids: Sequence[int] = ()
    swapped_out_ids: Sequence[int] = ()
    swapped_in_ids: Sequence[int] = ()
    first_token_ns: Sequence[int] = ()
    """Arrival to first token of each request whose first token came with this step's result."""
    load: Load = field(default_factory=Load)
    block_changes: Sequence[BlockTableChange] = ()
    state_copies: Sequence[tuple[int, Sequence[int], bool]] = ()
    """(position, page ids, whether the step has made it)."""
    freed_pages: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ExecutorState:
    """The state of one executor; names as in ExecutorInfo."""

    target: str
    index: int
    connected: bool
    draining: bool
    refusal: str
    incarnation: int
    epoch: int
    device: str
    block_size: int
    max_num_seqs: int
    num_inflight_plans: int
    last_step_id: int
    resident_bytes: int
    stalled_step_id: int
    stalled_s: float
    load: Load
    """Of this executor alone; `num_waiting` counts the requests that wait for it."""
    max_drafts: int = 0
    num_loaded_adapters: int = 0
    num_loading_adapters: int = 0
    max_loaded_adapters: int = 0
    max_loras: int = 0
    kv_group_windows: Sequence[int] = ()
    kv_group_pages: Sequence[int] = ()
    pages_per_state: int = 0
    memory: Sequence[MemoryPart] = ()


@dataclass(frozen=True, slots=True)
class GroupPages:
    """What a sequence holds in one KV group; names as in BlockTable."""

    first_block: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceBlockTable:
    """The current block table of one sequence; names as in SequenceBlocks."""

    sample_index: int
    block_ids: tuple[int, ...]
    ref_counts: tuple[int, ...]
    num_computed_tokens: int
    swapped: bool
    groups: tuple[GroupPages, ...] = ()
    """The pages of each KV group in place of `block_ids`; empty: a block is a page."""
