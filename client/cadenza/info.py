"""Descriptions of the model and of the server, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that stands for exactly one text, such as "<tool_call>"."""

    id: int
    text: str
    special: bool  # left out of texts with skip_special_tokens


@dataclass(frozen=True, slots=True)
class ChatExamples:
    """Small chats as the model's chat template shows them; empty texts: it shows no such chat."""

    prompt: str = ""  # a turn of the user, and the header of the answer
    call: str = ""  # the same, and a call of a tool with its result
    calls: str = ""  # the same with two calls
    thought: str = ""  # an answer with a thought
    thought_and_call: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model."""

    model: str  # folder or hub id, as given to the executor
    architecture: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    dtype: str
    eos_token_ids: list[int]
    bos_token_id: int | None
    has_tokenizer: bool  # text prompts and text output work
    has_chat_template: bool  # chat works
    num_parameters: int
    exact_numerics: bool  # a token does not depend on the batch that it is computed in
    fingerprint: bytes  # digest of everything that determines output bits; empty if the server does not report it
    chat_template: str = ""  # Jinja; empty: none
    added_tokens: list[AddedToken] = field(default_factory=list)  # beside the vocabulary, in order of their ids
    model_type: str = ""  # by the model's config.json, such as "llama"; empty: none
    default_sampling: dict[str, float] = field(default_factory=dict)  # suggested by the model's files, by field
    chat_examples: ChatExamples | None = None  # None: there is no chat template, or the server does not say


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server's current queues and memory, and its counts since start; the names are the proto's."""

    num_waiting: int
    num_running: int
    num_swapped: int
    num_device_blocks: int
    num_used_device_blocks: int
    num_cached_device_blocks: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_stored_tokens: int
    num_unused_slots: int
    num_reserved_slots: int
    num_used_slots: int
    num_client_tasks: int
    num_steps: int
    num_output_tokens: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_shared_block_refs: int
    num_cached_host_blocks: int
    num_prefix_host_hits: int
    num_drafts: int  # of speculative decoding, checked since start
    num_accepted_drafts: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a part of an executor takes of a GPU's memory."""

    name: str  # such as "weights"
    computed_bytes: int  # before it was made
    measured_bytes: int  # what the GPU reported more in use afterwards


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """One executor as the scheduler sees it."""

    target: str
    connected: bool
    incarnation: int
    epoch: int
    device: str
    block_size: int  # tokens
    num_inflight_plans: int
    last_step_id: int
    resident_bytes: int  # memory resident in its process; 0: not known
    stalled_step_id: int = 0  # a step that has run for much longer than it should; 0: none
    stalled_s: float = 0.0  # for how long that step has run
    index: int = 0  # in step records; never reused
    draining: bool = False  # it takes no new requests
    refusal: str = ""  # why it takes no requests although it answers; empty: nothing is wrong
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    num_device_blocks: int = 0
    num_used_device_blocks: int = 0
    num_cached_device_blocks: int = 0
    max_num_seqs: int = 0  # 0: not known
    num_steps: int = 0  # since the server's start, as the counts below
    num_output_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_drafts: int = 0  # of speculative decoding, checked there
    num_accepted_drafts: int = 0
    max_drafts: int = 0  # of a sequence, in its newest step with a result in which sequences decoded
    num_loaded_adapters: int = 0
    max_loaded_adapters: int = 0  # 0: it has no adapters
    kv_group_windows: tuple[int, ...] = ()  # by KV group, 0: none; empty: a KV block is a page, and there are no states
    kv_group_pages: tuple[int, ...] = ()  # pages of a block in each KV group: then its blocks here are pages
    pages_per_state: int = 0  # of a sequence's recurrent state; 0: there is none
    memory: tuple[DeviceMemory, ...] = ()  # of its GPU; empty: it has none, or has not been connected

    @property
    def state(self) -> str:
        """Whether it takes requests: serving, or why not: refused, lost, stalled, draining."""
        if self.refusal:
            return "refused"
        if not self.connected:
            return "lost"
        if self.stalled_step_id:
            return "stalled"
        return "draining" if self.draining else "serving"

    @property
    def reason(self) -> str:
        """Why it is refused or stalled; empty in the other states."""
        if self.state == "stalled":
            return f"step {self.stalled_step_id} has run for {self.stalled_s:.0f} s"
        return self.refusal


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """The load of one tenant."""

    name: str  # in the tenants file; empty: the one tenant of a server without such a file
    num_waiting: int
    num_running: int
    num_queued_tokens: int  # prompt tokens of its requests that have not begun to run
    num_output_tokens: int  # since the server's start, as the count below
    num_rejected: int  # requests refused because the queue was full or one of its limits was reached
    weight: float  # its share where the order is fair


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The unfinished requests of a LoRA adapter."""

    name: str
    num_running: int
    num_waiting: int  # in the queue, for its load, or preempted


@dataclass(frozen=True, slots=True)
class FaultCount:
    """How often one kind of fault has occurred since the server's start."""

    kind: str  # as in metrics, such as "executor_lost"; "fault 99" for one that this client does not know
    count: int
    last_age_s: float  # seconds since the last one
    last_executor: str  # the executor that it was about; empty: none


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's version, options and state. A tenant without admin sees its own part, and no executors."""

    version: str
    protocol_version: int
    options: dict[str, str]
    load: ServerLoad
    executors: list[ExecutorInfo]
    uptime_s: float
    draining: bool
    resident_bytes: int  # memory resident in the scheduler's process; 0: not known
    tenants: list[TenantInfo] = field(default_factory=list)  # by name; empty: the server does not say
    faults: list[FaultCount] = field(default_factory=list)  # of each kind that has occurred
    adapters: list[AdapterUse] = field(default_factory=list)  # those in use, the one with the most requests first
