"""Executor profiles: step costs, limits, and the overheads between an executor and a client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cadenza_loadtest.requests import LoadTestError
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.types import ExecutorSpec

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Overheads(BaseModel):
    """Delays of a step or a request outside the executor, in microseconds each.

    With one plan in flight, `plan_us` and twice `transit_us` lie between any two steps; with two or more, the running
    step hides them as far as it is longer.
    """

    model_config = _STRICT

    plan_us: float = Field(default=0.0, ge=0, description="The scheduler's own work for one step.")
    transit_us: float = Field(default=0.0, ge=0, description="Transit of a plan or a result, each.")
    request_us: float = Field(default=0.0, ge=0, description="From a client's send to the queue.")
    reply_us: float = Field(default=0.0, ge=0, description="From an applied result to the client.")


class Noise(BaseModel):
    """Random variation of times, gamma distributed around the modelled value; 0: none.

    With short steps, variation costs throughput: an early plan does not make up for a late one.
    """

    model_config = _STRICT

    step_us: float = Field(
        default=0.0,
        ge=0,
        description="Variance over mean of a step's time, in microseconds: long steps vary less for their length.",
    )
    overheads: float = Field(
        default=0.0, ge=0, le=3, description="Coefficient of variation of plan_us and transit_us, drawn for each step."
    )


class ProfileLimits(BaseModel):
    """Limits of an executor; the defaults are the executor service's own on the CPU, for up to 512 sequences."""

    model_config = _STRICT

    block_size: int = Field(default=16, ge=1, description="Tokens of a KV block.")
    num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks on the device; default: as many as a full batch could use."
    )
    num_host_blocks: int = Field(default=0, ge=0, description="KV blocks in host memory, to swap to.")
    max_num_seqs: int = Field(default=64, ge=1, description="Most sequences of a step.")
    max_num_batched_tokens: int = Field(default=512, ge=1, description="Most tokens of a step.")
    max_model_len: int = Field(default=4096, ge=1, description="Most tokens of a sequence.")
    max_inflight_plans: int = Field(default=4, ge=1, le=4, description="Most plans queued at once.")

    @model_validator(mode="after")
    def _steps_hold_a_batch(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )
        return self

    @property
    def pool_size(self) -> int:
        """KV blocks on the device."""
        return self.num_blocks or self.max_num_seqs * -(-self.max_model_len // self.block_size)


class ExecutorProfile(BaseModel):
    """Everything that the simulator knows about an executor. As JSON it is a file for `cadenza simulate --executor
    FILE`."""

    model_config = _STRICT

    costs: StepCosts = StepCosts()
    overheads: Overheads = Overheads()
    noise: Noise = Noise()
    limits: ProfileLimits = ProfileLimits()
    name: str = ""
    source: str = Field(default="", description="Where the numbers come from.")

    def changed(self, options: dict[str, Any]) -> ExecutorProfile:
        """The same profile with the limits that these executor options set: block_size, num_gpu_blocks, num_cpu_blocks,
        max_…

        With another block size both pools keep their size in tokens, and a token's KV takes as long to move:
        `moved_block_us` scales with the block size. Raises LoadTestError.
        """
        names = {"num_gpu_blocks": "num_blocks", "num_cpu_blocks": "num_host_blocks"}
        given = {names.get(name, name): value for name, value in options.items()}
        try:
            limits = ProfileLimits.model_validate({**self.limits.model_dump(), **given})
        except ValidationError as error:
            raise LoadTestError(f"executor {self.name}: {_first(error)}") from None
        old, new = self.limits.block_size, limits.block_size
        pools = {name: getattr(limits, name) for name in names.values() if name not in given}
        held = {name: max(1, count * old // new) for name, count in pools.items() if count}
        costs = self.costs.model_copy(update={"moved_block_us": self.costs.moved_block_us * new / old})
        return self.model_copy(update={"limits": limits.model_copy(update=held), "costs": costs})

    def spec(self, config: SchedulerConfig) -> ExecutorSpec:
        """The executor's spec for the core: its limits, narrowed by the scheduler's options as the plan loop does."""
        limits = self.limits
        return ExecutorSpec(
            block_size=limits.block_size,
            num_blocks=limits.pool_size,
            num_slots=2 * limits.max_num_seqs,  # as in the executor service
            max_num_seqs=min(config.max_num_seqs or limits.max_num_seqs, limits.max_num_seqs),
            max_num_batched_tokens=min(
                config.max_num_batched_tokens or limits.max_num_batched_tokens, limits.max_num_batched_tokens
            ),
            max_model_len=min(config.max_model_len or limits.max_model_len, limits.max_model_len),
            watermark=config.watermark,
            num_host_blocks=limits.num_host_blocks,
        )


def read_profile(path: str) -> ExecutorProfile:
    """Read a profile from a file: an ExecutorProfile, or costs alone, as for the executor's `--simulate FILE`.

    Raises a LoadTestError that names the file and the field.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadTestError(f"--executor {path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise LoadTestError(f"--executor {path}: this is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise LoadTestError(f"--executor {path}: must be an object with costs, not {type(content).__name__}")
    whole = content if not content or "costs" in content else {"costs": content}
    try:
        profile = ExecutorProfile.model_validate(whole)
    except ValidationError as error:
        raise LoadTestError(f"--executor {path}: {_first(error)}") from None
    return profile if profile.name else profile.model_copy(update={"name": Path(path).stem})


def write_profile(path: str, profile: ExecutorProfile) -> None:
    """Write a profile to a file that `read_profile` reads; raises LoadTestError."""
    try:
        Path(path).write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise LoadTestError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(map(str, problem["loc"]))
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
