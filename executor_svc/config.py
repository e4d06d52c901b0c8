"""Options of the executor service: one name everywhere, checked here; __main__ reads arguments and environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ExecutorConfig(BaseSettings):
    """Serve a model to a Cadenza scheduler. Every option can also be set in the environment: CADENZA_BLOCK_SIZE=32."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="CADENZA_",
        cli_prog_name="python -m executor_svc",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    model: str = Field(min_length=1, description="Folder or Hugging Face hub id of the model.")
    listen: str = Field("127.0.0.1:50052", description="HOST:PORT to listen on; port 0 takes any free one.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of weights, activations and KV; auto: the checkpoint's own."
    )
    numerics: Literal["exact", "fast"] = Field(
        "exact", description="exact: a token's bits never depend on what it was batched with."
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="Where weights come from; dummy: seeded random ones."
    )
    seed: int = Field(0, ge=0, description="Seed of dummy weights.")
    block_size: int = Field(16, description="Tokens per KV block: 8, 16, 32 or 64.")
    num_gpu_blocks: int | None = Field(None, ge=1, description="Device KV blocks, on the CPU too; default: what fits.")
    num_cpu_blocks: int = Field(0, ge=0, description="Host KV blocks, to swap to.")
    gpu_memory_utilization: float = Field(
        0.5, gt=0, le=1, description="Share of free device memory that weights and KV may take."
    )
    max_model_len: int | None = Field(None, ge=1, description="Most tokens of a sequence; default: the model's own.")
    max_num_seqs: int = Field(64, ge=1, description="Most sequences computed in one step.")
    max_num_batched_tokens: int = Field(
        512, ge=1, validate_default=True, description="Most tokens computed in one step; at least max_num_seqs."
    )
    max_inflight_plans: int = Field(4, ge=1, le=4, description="Most plans queued at once.")
    num_threads: int | None = Field(None, ge=1, description="Compute threads; default: the cores at hand.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged to stderr.")

    @field_validator("block_size")
    @classmethod
    def _block_size_divides_the_key_tile(cls, value: int) -> int:
        if value not in (8, 16, 32, 64):
            raise ValueError("must be 8, 16, 32 or 64")
        return value

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must be a folder or a hub id")
        return value

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _every_sequence_gets_a_token(cls, value: int, info: ValidationInfo) -> int:
        max_num_seqs = info.data.get("max_num_seqs", 1)
        if value < max_num_seqs:
            raise ValueError(f"{value} is less than max_num_seqs {max_num_seqs}: a step gives each of them a token")
        return value
