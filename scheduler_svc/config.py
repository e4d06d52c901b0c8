"""Options of the scheduler service: one name everywhere, checked here; __main__ reads arguments and environment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

_LATER = "is not built yet; use {}"


class SchedulerConfig(BaseSettings):
    """Serve clients by a Cadenza executor. Options can also be set in the environment, as in CADENZA_MAX_NUM_SEQS=8."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="CADENZA_",
        cli_prog_name="python -m scheduler_svc",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    executor: Annotated[list[str], NoDecode] = Field(["127.0.0.1:50052"], description="HOST:PORT of an executor.")
    listen: str = Field("127.0.0.1:50051", description="HOST:PORT to listen on; port 0 takes any free one.")
    tokenizer: str | None = Field(
        None, description="Folder or hub id of the tokenizer; default: the model that the executor names."
    )
    skip_tokenizer_init: bool = Field(False, description="Load no tokenizer: token ids only.")
    max_model_len: int | None = Field(None, ge=1, description="Most tokens of a sequence; default: the executor's.")
    max_num_seqs: int | None = Field(None, ge=1, description="Most sequences in one step; default: the executor's.")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Token budget of one step; default: the executor's."
    )
    max_queued_requests: int = Field(
        1024, ge=1, description="Most requests waiting; further ones get RESOURCE_EXHAUSTED."
    )
    max_inflight_plans: int = Field(2, ge=1, le=4, description="Plans sent ahead of their results.")
    batching: Literal["continuous", "static", "dynamic"] = Field("continuous", description="Batching policy.")
    preemption: Literal["recompute", "swap", "auto"] = Field("recompute", description="What happens to victims.")
    enable_prefix_caching: bool = Field(False, description="Reuse the KV of prompts that start alike.")
    watermark: float = Field(
        0.01, ge=0, lt=1, description="Share of KV blocks kept free when new sequences are admitted."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged to stderr.")

    @field_validator("executor", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [part.strip(' "') for part in value.strip("[] ").split(",")] if isinstance(value, str) else value

    @field_validator("executor")
    @classmethod
    def _one_executor(cls, value: list[str]) -> list[str]:
        if len(value) != 1:
            raise ValueError("exactly one executor is supported so far")
        return value

    @field_validator("batching")
    @classmethod
    def _batching_is_built(cls, value: str) -> str:
        if value != "continuous":
            raise ValueError(_LATER.format("continuous"))
        return value

    @field_validator("preemption")
    @classmethod
    def _preemption_is_built(cls, value: str) -> str:
        if value != "recompute":
            raise ValueError(_LATER.format("recompute"))
        return value

    @field_validator("enable_prefix_caching")
    @classmethod
    def _prefix_caching_is_built(cls, value: bool) -> bool:
        if value:
            raise ValueError(_LATER.format("no-enable-prefix-caching"))
        return value
