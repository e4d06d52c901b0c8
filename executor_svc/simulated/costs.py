"""How long a simulated step takes: a model of the step's work, linear but for one term, from a JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from executor_svc.errors import StartError


class CostsError(StartError):
    """The file of costs cannot be used; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step did, as far as it costs."""

    tokens: int
    context_tokens: int
    """Positions that the computed tokens read, each its own included."""
    samples: int
    moved_blocks: int
    """Swapped or copied."""
    kv_tokens: int = 0
    """Positions whose KV the sequences read, each its own included, once for all tokens of a sequence."""


class StepCosts(BaseModel):
    """Microseconds, each 0 by default, so that nothing costs anything: `instant`.

    Where a device reads weights while it computes, a step takes as long as the longer of the two: `hidden_tokens` are
    those whose computing takes no longer than `step_us`, and costs nothing more (the roofline model: Williams,
    Waterman, Patterson, CACM 2009, https://doi.org/10.1145/1498765.1498785).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step_us: float = Field(default=0.0, ge=0, description="Every step.")
    token_us: float = Field(default=0.0, ge=0, description="Every token computed.")
    context_token_us: float = Field(default=0.0, ge=0, description="Every position that a computed token reads.")
    sample_us: float = Field(default=0.0, ge=0, description="Every token sampled.")
    moved_block_us: float = Field(default=0.0, ge=0, description="Every block swapped or copied.")
    kv_token_us: float = Field(default=0.0, ge=0, description="Every position whose KV a sequence reads in the step.")
    hidden_tokens: float = Field(default=0.0, ge=0, description="So many tokens of each step cost no token_us.")

    @property
    def instant(self) -> bool:
        """Does nothing cost anything."""
        return not any(
            (
                self.step_us, self.token_us, self.context_token_us, self.sample_us, self.moved_block_us,
                self.kv_token_us,
            )
        )  # fmt: skip

    def forward_ns(self, work: StepWork) -> int:
        """Nanoseconds of the forward pass."""
        us = self.step_us + self.token_us * max(0.0, work.tokens - self.hidden_tokens)
        us += self.context_token_us * work.context_tokens + self.kv_token_us * work.kv_tokens
        return round(1000 * us)

    def sample_ns(self, work: StepWork) -> int:
        """Nanoseconds of sampling."""
        return round(1000 * self.sample_us * work.samples)

    def move_ns(self, work: StepWork) -> int:
        """Nanoseconds of block operations."""
        return round(1000 * self.moved_block_us * work.moved_blocks)


def read_costs(source: str) -> StepCosts:
    """`instant`, or the path of a JSON file with fields of StepCosts; raises CostsError.

    The file may hold them as `costs`, beside what others know of an executor of this kind: `cadenza fit-costs` and
    `cadenza simulate`.
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
