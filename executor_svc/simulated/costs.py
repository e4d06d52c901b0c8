"""How long a simulated step takes: a linear model of the step's work, from a JSON file."""

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


class StepCosts(BaseModel):
    """Microseconds, each 0 by default, so that nothing costs anything: `instant`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step_us: float = Field(default=0.0, ge=0, description="Every step.")
    token_us: float = Field(default=0.0, ge=0, description="Every token computed.")
    context_token_us: float = Field(default=0.0, ge=0, description="Every position that a computed token reads.")
    sample_us: float = Field(default=0.0, ge=0, description="Every token sampled.")
    moved_block_us: float = Field(default=0.0, ge=0, description="Every block swapped or copied.")

    @property
    def instant(self) -> bool:
        """Does nothing cost anything."""
        return not any((self.step_us, self.token_us, self.context_token_us, self.sample_us, self.moved_block_us))

    def forward_ns(self, work: StepWork) -> int:
        """Nanoseconds of the forward pass."""
        us = self.step_us + self.token_us * work.tokens + self.context_token_us * work.context_tokens
        return round(1000 * us)

    def sample_ns(self, work: StepWork) -> int:
        """Nanoseconds of sampling."""
        return round(1000 * self.sample_us * work.samples)

    def move_ns(self, work: StepWork) -> int:
        """Nanoseconds of block operations."""
        return round(1000 * self.moved_block_us * work.moved_blocks)


def read_costs(source: str) -> StepCosts:
    """`instant`, or the path of a JSON file with fields of StepCosts; raises CostsError."""
    if source == "instant":
        return StepCosts()
    try:
        return StepCosts.model_validate(json.loads(Path(source).read_text(encoding="utf-8")))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CostsError(f"--simulate {source}: neither instant nor a file of costs: {reason}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "costs"
        raise CostsError(f"--simulate {source}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise CostsError(f"--simulate {source}: this is not JSON: {error}") from error
