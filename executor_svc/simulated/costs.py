"""The modelled duration of a simulated step: linear in the step's work, except for one term; from a JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from executor_svc.errors import StartError


class CostsError(StartError):
    """The file of step costs is unusable; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The quantities of a step that have a cost."""

    tokens: int
    context_tokens: int
    """Positions that the computed tokens attend to, each token's own included."""
    samples: int
    moved_blocks: int
    """Blocks swapped or copied."""
    kv_tokens: int = 0
    """Positions whose KV the sequences read, counted once per sequence, the computed tokens included."""


class StepCosts(BaseModel):
    """Costs in microseconds, each 0 by default: `instant`.

    A device that reads weights while it computes takes the longer of the two times: `hidden_tokens` is the number of
    tokens whose computation takes no longer than `step_us` and therefore costs nothing more (the roofline model:
    Williams, Waterman, Patterson, CACM 2009, https://doi.org/10.1145/1498765.1498785).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step_us: float = Field(default=0.0, ge=0, description="Per step.")
    token_us: float = Field(default=0.0, ge=0, description="Per computed token.")
    context_token_us: float = Field(default=0.0, ge=0, description="Per position that a computed token attends to.")
    sample_us: float = Field(default=0.0, ge=0, description="Per sampled token.")
    moved_block_us: float = Field(default=0.0, ge=0, description="Per swapped or copied block.")
    kv_token_us: float = Field(default=0.0, ge=0, description="Per position whose KV a sequence reads in the step.")
    hidden_tokens: float = Field(default=0.0, ge=0, description="Tokens of each step that cost no token_us.")
    adapter_load_us: float = Field(default=0.0, ge=0, description="Per loaded adapter, beside the steps.")
    adapter_mb_us: float = Field(default=0.0, ge=0, description="Per MB of a loaded adapter's files.")
    draft_acceptance: float = Field(
        default=0.7, ge=0, le=1, description="Probability that a draft is right, with --speculative; no cost."
    )

    @property
    def instant(self) -> bool:
        """Whether all costs are 0."""
        return not any(
            (
                self.step_us, self.token_us, self.context_token_us, self.sample_us, self.moved_block_us,
                self.kv_token_us,
            )
        )  # fmt: skip

    def forward_ns(self, work: StepWork) -> int:
        """Return the nanoseconds of the forward pass."""
        us = self.step_us + self.token_us * max(0.0, work.tokens - self.hidden_tokens)
        us += self.context_token_us * work.context_tokens + self.kv_token_us * work.kv_tokens
        return round(1000 * us)

    def adapter_ns(self, num_bytes: int) -> int:
        """Return the nanoseconds of loading an adapter whose files have so many bytes."""
        return round(1000 * (self.adapter_load_us + self.adapter_mb_us * num_bytes / 1e6))

    def sample_ns(self, work: StepWork) -> int:
        """Return the nanoseconds of sampling."""
        return round(1000 * self.sample_us * work.samples)

    def move_ns(self, work: StepWork) -> int:
        """Return the nanoseconds of block moves."""
        return round(1000 * self.moved_block_us * work.moved_blocks)


def read_costs(source: str) -> StepCosts:
    """Read step costs; source: `instant`, or the path of a JSON file with fields of StepCosts. Raises CostsError.

    The file may hold them as `costs` within the executor profile of `cadenza fit-costs` and `cadenza simulate`.
    """
    if source == "instant":
        return StepCosts()
    try:
        content = json.loads(Path(source).read_text(encoding="utf-8"))
        alone = content["costs"] if isinstance(content, dict) and "costs" in content else content
        return StepCosts.model_validate(alone)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CostsError(f"--simulate {source}: neither instant nor a file of costs: {reason}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "costs"
        raise CostsError(f"--simulate {source}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise CostsError(f"--simulate {source}: this is not JSON: {error}") from error
