"""Tables of rotary position embedding, made once by absolute position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles; the fields after factor are for llama3 only."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(config: RopeConfig, head_size: int) -> Tensor:
    """Return [head_size / 2] fp32 radians per position, as transformers computes them (`modeling_rope_utils`)."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = config.original_max_position / config.high_freq_factor
    shortest_divided = config.original_max_position / config.low_freq_factor
    share = (config.original_max_position / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - share) * frequencies / config.factor + share * frequencies
    result = torch.where(wavelengths > shortest_divided, frequencies / config.factor, frequencies)
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_divided)
    return torch.where(between, blended, result)


class RotaryTables:
    """cos and sin for every position up to max_model_len, [max_model_len, head_size] in the model's dtype.

    The first half of sin is negated, so that rotating x is x * cos + swap_halves(x) * sin.
    """

    def __init__(
        self, config: RopeConfig, head_size: int, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Angles are rounded to fp32, as in transformers; cos and sin of them are taken in float64 and rounded."""
        angles = torch.arange(max_model_len).float()[:, None] * inverse_frequencies(config, head_size)
        cos, sin = angles.double().cos(), angles.double().sin()
        self._cos = torch.cat([cos, cos], -1).float().to(dtype).to(device)
        self._sin = torch.cat([-sin, sin], -1).float().to(dtype).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, head_size] at positions [T] int64."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
