"""Rotary position embedding: cos and sin of each token's angles, from tables or computed from the sequence length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from executor_svc.device.kernels import Rope
from executor_svc.models.base import ModelConfigError
from executor_svc.models.layers.rope_scaling import DynamicScaling, LongScalingOfTwo, NoScaling, Scaling
from executor_svc.portable_math import LARGEST_ANGLE, cos_and_sin, log

_TILE_ROWS = 512
"""Rows of a table that are computed at once, in cache."""

_NO_SCALING = NoScaling()
LATER = {"later": True}
"""Marks fields that are in a model's digest only where they have other values than their defaults: so digests of
models from before there were such fields stay as they were."""


Rounding = Literal["products", "sum", "angles and sum"]
"""What is rounded to the model's dtype: cos, sin, products and sum (Llama); the sum alone; cos, sin and the sum."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries at position p are multiplied with 1 + beta * ln(1 + floor((p + first) / original)) after the rotation."""

    beta: float
    original_max_position: int
    first: int = field(default=0, repr=False, metadata=LATER)
    """What counts as position 0: 1 of Llama 4."""
    rounded: bool = field(default=True, repr=False, metadata=LATER)
    """Whether the factor is rounded to the model's dtype."""

    def factors(self, max_model_len: int, dtype: torch.dtype) -> Tensor:
        """Return the factor of each position below max_model_len."""
        length, end = self.original_max_position, max_model_len + self.first
        steps = [1 + self.beta * log(1 + step) for step in range(-(-end // length))]
        found = torch.tensor(steps, dtype=torch.float32).repeat_interleave(length)[self.first : end]
        return found.to(dtype) if self.rounded else found


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The mapping from positions to angles."""

    theta: float
    size: int
    """Number of leading dimensions of each head that are rotated: even, all or a part of them; 0: none."""
    scaling: Scaling = _NO_SCALING
    rounding: Rounding = "products"
    query_scaling: QueryScaling | None = None


class Rotary(Protocol):
    """cos and sin by position: a pure function of position and length, independent of batch and chunk."""

    def new(self, positions: Tensor) -> Rope:
        """Return the tensors that kernels read, for tokens at `positions` [max_tokens] int64, which the caller fills.

        The rotation of x is x * cos + swap_halves(x) * sin.
        """
        ...

    def fill(self, positions: Tensor, rope_lens: Tensor, rope: Rope) -> None:
        """Set a rope of `new` for a step of T tokens.

        Args:
            positions: [T] int64, absolute.
            rope_lens: [T] int64, as `forward_batch.ForwardBatch` defines them.
        """
        ...


def make_rotary(
    config: RopeConfig | None, max_model_len: int, dtype: torch.dtype, device: torch.device, columns: int = 0
) -> Rotary:
    """Return cos and sin for positions below max_model_len; config None: nothing is rotated.

    columns: of cos and sin then: latent attention has them.
    """
    if config is None:
        return NoRotary(dtype, device, columns)
    if isinstance(config.scaling, DynamicScaling):
        return DynamicRotary(config, config.scaling, dtype)
    return RotaryTables(config, max_model_len, dtype, device)


def inverse_frequencies(config: RopeConfig, max_model_len: int) -> Tensor:
    """Return [size / 2] fp32 radians per position, for an embedding that does not depend on lengths."""
    assert not isinstance(config.scaling, DynamicScaling)
    return config.scaling.frequencies(config.theta, config.size, max_model_len)


def _halves(angles: Tensor, attention_factor: float, dtype: torch.dtype) -> Tensor:
    """Return cos and sin in one tensor [rows, size] of angles [rows, size / 2] fp32: in float64, rounded to fp32."""
    wide = angles.double()
    if angles.device.type == "cpu":
        cos, sin = map(torch.from_numpy, cos_and_sin(wide.numpy()))
    else:
        cos, sin = wide.cos(), wide.sin()
    both = torch.cat([cos, sin], -1).float()
    return (both if attention_factor == 1.0 else both * attention_factor).to(dtype)


def _spread(halves: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [T, size] each, from [T, size] with cos in the first half and sin in the second."""
    cos, sin = halves.chunk(2, -1)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class NoRotary:
    """Rotates nothing: cos and sin have no columns, or one row of ones and zeros."""

    def __init__(self, dtype: torch.dtype, device: torch.device, columns: int = 0) -> None:
        self._cos = torch.ones(1, columns, dtype=dtype, device=device)
        self._sin = torch.zeros(1, columns, dtype=dtype, device=device)

    def new(self, positions: Tensor) -> Rope:
        return Rope(self._cos, self._sin, torch.zeros_like(positions) if self._cos.shape[1] else positions)

    def fill(self, positions: Tensor, rope_lens: Tensor, rope: Rope) -> None:
        """Nothing to do."""


class RotaryTables:
    """Tables of max_model_len rows for cos and sin: 2 * max_model_len * size numbers, in the model's dtype or fp32."""

    def __init__(self, config: RopeConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Angles are rounded to fp32, as in transformers. dtype: of the model."""
        frequencies = inverse_frequencies(config, max_model_len) if config.size else torch.empty(0)
        stored = dtype if config.rounding == "products" else torch.float32
        rounded = torch.float32 if config.rounding == "sum" else dtype
        cos, sin = (torch.empty(max_model_len, config.size, dtype=stored) for _ in range(2))
        scaling, factor = config.scaling, config.scaling.attention_factor
        if isinstance(scaling, LongScalingOfTwo):
            factor = scaling.attention_factor_for(max_model_len)
        for start in range(0, max_model_len if config.size else 0, _TILE_ROWS):
            end = min(start + _TILE_ROWS, max_model_len)
            angles = torch.arange(start, end).float()[:, None] * frequencies
            if float(angles[-1].abs().max()) > LARGEST_ANGLE:
                raise ModelConfigError(
                    f"max_model_len {max_model_len} has rotary angles over {LARGEST_ANGLE:.0f} radians"
                )
            cos[start:end], sin[start:end] = _spread(_halves(angles, factor, rounded))
        self._cos, self._sin, queries = cos.to(device), sin.to(device), config.query_scaling
        self._query_scales = None if queries is None else queries.factors(max_model_len, dtype).to(device)

    def new(self, positions: Tensor) -> Rope:
        return Rope(self._cos, self._sin, positions, self._query_scales)

    def fill(self, positions: Tensor, rope_lens: Tensor, rope: Rope) -> None:
        """Nothing to do: the tables hold all positions."""


class DynamicRotary:
    """Computes each token's angles from its position and the length of its sequence, as transformers' generate does.

    transformers computes the frequencies for every forward pass: of a prompt from its length, of each later token from
    the length that includes it. Keys in the cache keep their angles.
    """

    def __init__(self, config: RopeConfig, scaling: DynamicScaling, dtype: torch.dtype) -> None:
        assert config.rounding == "products", "no family has another with this scaling"
        assert config.query_scaling is None, "no family has it with this scaling"
        self._config = config
        self._scaling = scaling
        self._dtype = dtype

    def new(self, positions: Tensor) -> Rope:
        size, device = (len(positions), self._config.size), positions.device
        cos, sin = (torch.zeros(size, dtype=self._dtype, device=device) for _ in range(2))
        return Rope(cos, sin, torch.arange(len(positions), device=device))

    def fill(self, positions: Tensor, rope_lens: Tensor, rope: Rope) -> None:
        rows = positions.shape[0]
        frequencies = self._scaling.frequencies_at(self._config.theta, self._config.size, rope_lens)
        angles = positions.float()[:, None] * frequencies
        rope.cos[:rows], rope.sin[:rows] = _spread(_halves(angles, self._scaling.attention_factor, self._dtype))
