"""Rotary position embedding: cos and sin of each token's angles, from a table or from the length of its sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.device.kernels import Rope
from executor_svc.models.layers.rope_scaling import DynamicScaling, NoScaling, Scaling

_TILE_ROWS = 64
"""cos, sin and pow are taken on tiles of this many rows, always full: vector code may differ in bits from the scalar
code that finishes a tensor, so a row's bits would depend on how many rows there are."""

_NO_SCALING = NoScaling()


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles."""

    theta: float
    size: int
    """The leading dimensions of each head that are rotated, an even number: all of them, or a part."""
    scaling: Scaling = _NO_SCALING


class Rotary(Protocol):
    """cos and sin by position: a pure function of position and length, whatever batch or chunk a token is in."""

    def new(self, positions: Tensor) -> Rope:
        """Return what kernels read, for steps whose tokens stand at `positions` [most tokens] int64, filled by others.

        Rotating x is then x * cos + swap_halves(x) * sin.
        """
        ...

    def fill(self, positions: Tensor, rope_lens: Tensor, rope: Rope) -> None:
        """Make what `new` returned ready for a step of T tokens.

        Args:
            positions: [T] int64, absolute.
            rope_lens: [T] int64, the length of each token's sequence as `input_batch.ForwardBatch` defines it.
        """
        ...


def make_rotary(config: RopeConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """Return cos and sin for positions below max_model_len."""
    if isinstance(config.scaling, DynamicScaling):
        return DynamicRotary(config, config.scaling, dtype)
    return RotaryTables(config, max_model_len, dtype, device)


def inverse_frequencies(config: RopeConfig, max_model_len: int) -> Tensor:
    """Return [size / 2] fp32 radians per position of an embedding whose angles do not depend on lengths."""
    assert not isinstance(config.scaling, DynamicScaling)
    return config.scaling.frequencies(config.theta, config.size, max_model_len)


def _halves(angles: Tensor, attention_factor: float, dtype: torch.dtype) -> Tensor:
    """Return cos beside sin, [rows, size], of angles [rows, size / 2] fp32: taken in float64, rounded to fp32."""
    wide = angles.double()
    both = torch.cat([wide.cos(), wide.sin()], -1).float()
    return (both if attention_factor == 1.0 else both * attention_factor).to(dtype)


def _spread(halves: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, size] of [T, size] with cos in the first half and sin in the second."""
    cos, sin = halves.chunk(2, -1)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class RotaryTables:
    """A table each of max_model_len rows: together 2 * max_model_len * size numbers in the model's dtype."""

    def __init__(self, config: RopeConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Angles are rounded to fp32, as in transformers."""
        frequencies = inverse_frequencies(config, max_model_len)
        tiles = -(-max_model_len // _TILE_ROWS)
        cos, sin = (torch.empty(tiles * _TILE_ROWS, config.size, dtype=dtype) for _ in range(2))
        for start in range(0, tiles * _TILE_ROWS, _TILE_ROWS):
            angles = torch.arange(start, start + _TILE_ROWS).float()[:, None] * frequencies
            end = start + _TILE_ROWS
            cos[start:end], sin[start:end] = _spread(_halves(angles, config.scaling.attention_factor, dtype))
        self._cos, self._sin = cos.to(device), sin.to(device)

    def new(self, positions: Tensor) -> Rope:
        return Rope(self._cos, self._sin, positions)

    def fill(self, positions: Tensor, rope_lens: Tensor, rope: Rope) -> None:
        """The tables hold all positions already."""


class DynamicRotary:
    """Computes each token's angles from its position and the length of its sequence, as transformers' generate does.

    transformers makes the frequencies anew for every forward pass: for a prompt those of its length, for each token
    after it those of the length with it. Keys in the cache keep the angles that they were given.
    """

    def __init__(self, config: RopeConfig, scaling: DynamicScaling, dtype: torch.dtype) -> None:
        self._config = config
        self._scaling = scaling
        self._dtype = dtype

    def new(self, positions: Tensor) -> Rope:
        size, device = (len(positions), self._config.size), positions.device
        cos, sin = (torch.zeros(size, dtype=self._dtype, device=device) for _ in range(2))
        return Rope(cos, sin, torch.arange(len(positions), device=device))

    def fill(self, positions: Tensor, rope_lens: Tensor, rope: Rope) -> None:
        rows = positions.shape[0]
        # Elsewhere every row is computed alike: one tile, and few launches.
        height = _TILE_ROWS if positions.device.type == "cpu" else max(rows, 1)
        padding = (0, -rows % height)
        tiles = zip(
            functional.pad(positions, padding).split(height),
            functional.pad(rope_lens, padding).split(height),
            strict=True,
        )
        rope.cos[:rows], rope.sin[:rows] = _spread(torch.cat([self._tile(*tile) for tile in tiles])[:rows])

    def _tile(self, positions: Tensor, lengths: Tensor) -> Tensor:
        frequencies = self._scaling.frequencies_at(self._config.theta, self._config.size, lengths)
        return _halves(positions.float()[:, None] * frequencies, self._scaling.attention_factor, self._dtype)
