"""Options of the scheduler service, validated here; __main__ reads arguments and environment."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from cadenza_common.serving.stop_signals import DRAIN_TIMEOUT_S
from cadenza_common.settings.help import about
from cadenza_common.settings.service import ServiceSettings, split_list


class SchedulerConfig(ServiceSettings):
    """Serve clients with a Cadenza executor.

    Example: python -m scheduler_svc --executor 127.0.0.1:50052 --listen :50051

    Prints `ready HOST:PORT` on stdout once it serves; logs go to stderr. Every
    option can also be set in the environment, as in CADENZA_MAX_NUM_SEQS=8, or
    in a TOML file (--config), as in max_num_seqs = 8.
    """

    model_config = SettingsConfigDict(cli_prog_name="python -m scheduler_svc")
    service: ClassVar[str] = "scheduler"
    exit_codes: ClassVar[str] = (
        "Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong options, 3 another scheduler took the executor."
    )

    executor: Annotated[list[str], NoDecode] = Field(
        ["127.0.0.1:50052"],
        description="HOST:PORT of an executor; several times, or with commas, for several ones. dns:///NAME:PORT: each "
        "address of the name; k8s://NAMESPACE/SERVICE: each ready endpoint; file:PATH: each line of the file; "
        "docs/executors.md.",
        json_schema_extra=about("Basics"),
    )
    listen: str = Field(
        "127.0.0.1:50051",
        description="HOST:PORT to listen on; port 0 takes any free one.",
        json_schema_extra=about("Basics"),
    )
    tokenizer: str | None = Field(
        None,
        description="Folder, GGUF file or hub id of the tokenizer; default: that of the executor's model.",
        json_schema_extra=about("Model"),
    )
    skip_tokenizer_init: bool = Field(
        False,
        description="Load no tokenizer: prompts and outputs are token ids only.",
        json_schema_extra=about("Model"),
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Jinja template of chats in place of the tokenizer's: a file, or the template itself.",
        json_schema_extra=about("Model"),
    )
    chat_template_content_format: Literal["auto", "string", "parts"] = Field(
        "auto",
        description="How messages give their content to chat templates: as a string, or as a list of parts; auto: for "
        "each role as the template shows it, found as it is loaded.",
        json_schema_extra=about("Model"),
    )
    trust_request_chat_template: bool = Field(
        False,
        description="Let requests bring chat templates of their own: they are rendered in a sandbox, by a process with "
        "bounds on memory and time; docs/security.md.",
        json_schema_extra=about("Model"),
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens of a sequence, prompt and output together; default: the executor's limit.",
        json_schema_extra=about("Memory", "tokens"),
    )
    enable_prefix_caching: bool = Field(
        True,
        description="Keep computed KV blocks for later prompts with the same prefix; a request can opt out.",
        json_schema_extra=about("Memory"),
    )
    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Share of KV blocks kept free when new sequences are admitted.",
        json_schema_extra=about("Memory", "share"),
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="Maximum sequences in one step; default: the executor's limit.",
        json_schema_extra=about("Batching", "sequences"),
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of one step; default: the executor's limit.",
        json_schema_extra=about("Batching", "tokens"),
    )
    max_inflight_plans: int = Field(
        2, ge=1, le=4, description="Plans sent ahead of their results.", json_schema_extra=about("Batching", "plans")
    )
    batching: Literal["continuous", "static", "dynamic"] = Field(
        "continuous",
        description="When sequences join a batch; continuous: at every step; static: a full batch starts together and "
        "runs until all have finished; dynamic: as static, but a batch also starts when its window ends.",
        json_schema_extra=about("Batching"),
    )
    batch_size: int = Field(
        8, ge=1, description="Requests of a static or dynamic batch.", json_schema_extra=about("Batching", "requests")
    )
    batch_window_ms: float = Field(
        50.0,
        ge=0,
        allow_inf_nan=False,
        description="How long a dynamic batch waits for more requests after its first.",
        json_schema_extra=about("Batching", "ms"),
    )
    waiting_served_ratio: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Continuous batching holds new requests back until the ratio of waiting to running ones reaches "
        "this, for 20 steps at most; 0: never.",
        json_schema_extra=about("Batching", "share"),
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="Maximum tokens of one prompt in a step, so that a long prompt leaves budget for others; 0: the "
        "whole budget.",
        json_schema_extra=about("Batching", "tokens"),
    )
    tenants: str | None = Field(
        None,
        min_length=1,
        description="TOML file of the tenants: tokens, weights and limits, read again when it changes; every call "
        "needs a token then; docs/tenants.md. Without it there is one tenant, and no call needs a token.",
        json_schema_extra=about("Scheduling"),
    )
    max_queued_requests: int = Field(
        1024,
        ge=1,
        validate_default=True,
        description="Maximum waiting requests; further ones are rejected with RESOURCE_EXHAUSTED. With --tenants each "
        "tenant may have as many as there are free places: one alone half of these.",
        json_schema_extra=about("Scheduling", "requests"),
    )
    max_resume_grace_s: float = Field(
        600.0,
        ge=0,
        allow_inf_nan=False,
        description="Longest time for which a request runs on and its results are kept after its stream was lost; a "
        "larger resume_grace_s of a request counts as this; 0: a lost stream aborts its request.",
        json_schema_extra=about("Scheduling", "s"),
    )
    max_kept_results_mb: float = Field(
        64.0,
        ge=0,
        allow_inf_nan=False,
        description="Memory for results of finished requests that are kept for clients which come back; beyond it the "
        "oldest are dropped before their resume_grace_s is over.",
        json_schema_extra=about("Memory", "MB"),
    )
    order: Literal["fcfs", "priority", "fair", "sjf"] = Field(
        "fcfs",
        description="Which request goes first; fcfs: the oldest; priority: the smallest priority, which also preempts "
        "larger ones; fair: one of the least-served tenant, and the default with --tenants; sjf: the shortest expected "
        "output.",
        json_schema_extra=about("Scheduling"),
    )
    max_wait_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="A request that arrived longer ago goes first in every order; without it, orders other than fcfs "
        "may let a request wait forever.",
        json_schema_extra=about("Scheduling", "s"),
    )
    preemption: Literal["recompute", "swap", "auto"] = Field(
        "recompute",
        description="What happens to the KV of a preempted request; recompute: it is computed again; swap: it moves to "
        "the host pool, if that has free blocks (--num-cpu-blocks); auto: the cheaper one by measured rates.",
        json_schema_extra=about("Scheduling"),
    )
    placement: Literal["expected-time", "round-robin"] = Field(
        "expected-time",
        description="Where a request runs, if there are several executors; expected-time: where its first token is "
        "expected first, by cached prefix, queue, free memory and measured rates; round-robin: each executor in turn.",
        json_schema_extra=about("Scheduling"),
    )
    allow_fingerprint_change: bool = Field(
        False,
        description="Let unfinished requests go on when an executor comes back with another numerics fingerprint, as "
        "after a change of threads or weights, though their later tokens may differ; otherwise they end with "
        "FAILED_PRECONDITION.",
        json_schema_extra=about("Scheduling"),
    )
    journal: str | None = Field(
        None,
        min_length=1,
        description="Directory of the journal, created if need be: unfinished requests survive the death of the "
        "scheduler and go on when it is started again with the same directory; docs/journal.md. One process at a time "
        "may use it.",
        json_schema_extra=about("Scheduling"),
    )
    journal_damage: Literal["refuse", "set-aside"] = Field(
        "refuse",
        description="What is done when the journal is damaged; refuse: the scheduler ends with an error that says how "
        "it shows; set-aside: its files move to a folder damaged-N of the directory, an error is logged, and the "
        "journal begins empty.",
        json_schema_extra=about("Scheduling"),
    )
    restart_grace_s: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="How long requests restored from the journal wait for their streams to come back before they are "
        "aborted.",
        json_schema_extra=about("Scheduling", "s"),
    )
    drain_timeout_s: float = Field(
        DRAIN_TIMEOUT_S,
        ge=0,
        allow_inf_nan=False,
        description="How long a service that got SIGTERM goes on: the scheduler with its requests, while it takes no "
        "new ones; the executor with its running step. 0, SIGINT (Ctrl-C) or a second signal: not at all.",
        json_schema_extra=about("Scheduling", "s"),
    )
    lora: Annotated[list[str], NoDecode] = Field(
        [],
        description="NAME=PATH of a LoRA adapter's folder, where the executors run; several times, or with commas, for "
        "several ones; docs/lora.md.",
        json_schema_extra=about("Adapters"),
    )
    lora_root: Annotated[list[str], NoDecode] = Field(
        [],
        description="Folder below which LoRA adapters may be loaded while serving; several times, or with commas, for "
        "several ones; default: none.",
        json_schema_extra=about("Adapters"),
    )
    lora_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder of LoRA adapters, where the executors run: the first request that names NAME loads the "
        "adapter in its folder NAME.",
        json_schema_extra=about("Adapters"),
    )
    max_loras: int | None = Field(
        None,
        ge=0,
        description="Maximum LoRA adapters in one batch; default: the executor's limit; 0: no adapters.",
        json_schema_extra=about("Adapters", "adapters"),
    )
    max_cpu_loras: int | None = Field(
        None,
        ge=1,
        description="Maximum LoRA adapters that an executor has loaded; default: the executor's limit.",
        json_schema_extra=about("Adapters", "adapters"),
    )
    lora_load_timeout_s: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="How long a request waits for its LoRA adapter's load; then it ends with FAILED_PRECONDITION.",
        json_schema_extra=about("Adapters", "s"),
    )
    executor_ca: str | None = Field(
        None,
        min_length=1,
        description="PEM file of CA certificates that the executors' certificates are checked against; with it the "
        "connections to executors use TLS; read again when it changes.",
        json_schema_extra=about("Security"),
    )
    executor_cert: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the certificate chain that the executors see; read again when it changes.",
        json_schema_extra=about("Security"),
    )
    executor_key: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the key of --executor-cert; read again when it changes.",
        json_schema_extra=about("Security"),
    )
    executor_server_name: str | None = Field(
        None,
        min_length=1,
        description="Name that the executors' certificates must have; default: the host of the executor's address.",
        json_schema_extra=about("Security"),
    )
    record: str | None = Field(
        None,
        min_length=1,
        description="File to write a plan log to: every call into the scheduler's core, every plan and result, for "
        "replay; docs/replay.md.",
        json_schema_extra=about("Logging"),
    )
    log_requests: bool = Field(
        False,
        description="Log one line for each request when it ends: its sizes, times and how it ended, never its text.",
        json_schema_extra=about("Logging"),
    )
    log_stats_interval_s: float = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="Time between two log lines of figures while requests run: queues, KV use, tokens/s; 0: none.",
        json_schema_extra=about("Logging", "s"),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="What is logged to stderr.", json_schema_extra=about("Logging")
    )

    @field_validator("lora", "lora_root", mode="before")
    @classmethod
    def _split_adapters(cls, value: object) -> object:
        return split_list(value)

    @field_validator("lora")
    @classmethod
    def _check_adapters(cls, value: list[str]) -> list[str]:
        names = [entry.partition("=")[0] for entry in value]
        for entry, name in zip(value, names, strict=True):
            if not name or not entry.partition("=")[2]:
                raise ValueError(f"{entry!r} is not NAME=PATH")
            if names.count(name) > 1:
                raise ValueError(f"{name} is given twice")
        return value

    @field_validator("executor", mode="before")
    @classmethod
    def _split_executors(cls, value: object) -> object:
        return [part.strip(' "') for part in value.strip("[] ").split(",")] if isinstance(value, str) else value

    @field_validator("executor")
    @classmethod
    def _check_executors(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("an address is empty")
        twice = [entry for index, entry in enumerate(value) if entry in value[:index]]
        if twice:
            raise ValueError(f"{twice[0]} is given twice")
        return value

    @model_validator(mode="before")
    @classmethod
    def _choose_order(cls, values: object) -> object:
        """Tenants get their shares unless another order is requested."""
        if isinstance(values, dict) and values.get("tenants") is not None and values.get("order") is None:
            return {**values, "order": "fair"}
        return values

    @field_validator("max_queued_requests")
    @classmethod
    def _check_queue_limit(cls, value: int, info: ValidationInfo) -> int:
        batch_size = info.data.get("batch_size", 1)
        if info.data.get("batching") == "static" and value < batch_size:
            raise ValueError(
                f"{value} requests at most may wait, so a static batch of batch_size {batch_size} never fills"
            )
        return value
