"""Frequencies of rotary position embedding, and their scalings to longer contexts.

Every type computes the values of transformers' `modeling_rope_utils`, with the same fp32 operations; powers and
logarithms are those of `portable_math`, so a table has the same bits on every processor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from executor_svc.portable_math import log, power


def plain_frequencies(theta: float, size: int) -> Tensor:
    """Return [size / 2] fp32 radians per position: theta^(-2i / size) (Su et al., 2021)."""
    return 1.0 / _powers(theta, size)


def _powers(theta: float, size: int) -> Tensor:
    """Return theta^(2i / size), [size / 2] fp32, rounded from float64."""
    return torch.from_numpy(power(theta, _exponents(size).double().numpy())).float()


def _exponents(size: int) -> Tensor:
    return torch.arange(0, size, 2, dtype=torch.int64).float() / size


@cache
def _exponents_on(size: int, device: torch.device) -> Tensor:
    """Return the exponents in float64, copied to the device once: no CUDA graph can hold a copy from the host."""
    return _exponents(size).to(device).double()


def _power(base: Tensor, exponent: Tensor | float) -> Tensor:
    """Return base to the exponent as fp32, rounded from float64; on the CPU with the same bits everywhere."""
    wide = base.double()
    if base.device.type != "cpu":
        return (wide**exponent).float()
    return torch.from_numpy(power(wide.numpy(), np.asarray(exponent, np.float64))).float()


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Unscaled positions."""

    attention_factor: float = 1.0
    """Factor of cos and sin, here and in the other types."""

    def frequencies(self, theta: float, size: int, max_model_len: int) -> Tensor:
        """Return [size / 2] fp32 radians per position, here and in the other types, for a context of max_model_len."""
        return plain_frequencies(theta, size)


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first pairs of halves have the frequencies of an unscaled embedding, the others 0 (Gemma 4)."""

    rotated: int
    """Dimensions with frequencies other than 0: even."""
    attention_factor: float = 1.0

    def frequencies(self, theta: float, size: int, max_model_len: int) -> Tensor:
        frequencies = plain_frequencies(theta, size)
        frequencies[self.rotated // 2 :] = 0.0
        return frequencies


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor (Chen et al., 2023)."""

    factor: float
    attention_factor: float = 1.0

    def frequencies(self, theta: float, size: int, max_model_len: int) -> Tensor:
        return plain_frequencies(theta, size) / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies of long wavelengths divided by a factor, of short ones kept, blended between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    attention_factor: float = 1.0

    def frequencies(self, theta: float, size: int, max_model_len: int) -> Tensor:
        frequencies = plain_frequencies(theta, size)
        wavelengths = 2 * math.pi / frequencies
        longest_kept = self.original_max_position / self.high_freq_factor
        shortest_divided = self.original_max_position / self.low_freq_factor
        if longest_kept == shortest_divided:  # Llama 4: nothing is between
            return torch.where(wavelengths > shortest_divided, frequencies / self.factor, frequencies)
        share = (self.original_max_position / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - share) * frequencies / self.factor + share * frequencies
        result = torch.where(wavelengths > shortest_divided, frequencies / self.factor, frequencies)
        between = (wavelengths >= longest_kept) & (wavelengths <= shortest_divided)
        return torch.where(between, blended, result)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """High frequencies kept, low ones divided by a factor, a ramp over dimensions between (Peng et al., 2023)."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    """Dimensions with more turns than this within the original length are kept."""
    beta_slow: float
    """Dimensions with fewer turns than this are divided."""
    truncate: bool
    """Whether the ramp begins and ends at whole dimensions."""

    def frequencies(self, theta: float, size: int, max_model_len: int) -> Tensor:
        wavelengths = _powers(theta, size)
        low, high = self._dimension(self.beta_fast, theta, size), self._dimension(self.beta_slow, theta, size)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            high += 0.001  # as in transformers, against a division by zero
        divided = torch.clamp((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        kept = 1 - divided
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def _dimension(self, turns: float, theta: float, size: int) -> float:
        """Return the dimension whose angle makes `turns` turns within the original length."""
        return size * log(self.original_max_position / (turns * 2 * math.pi)) / (2 * log(theta))


@dataclass(frozen=True, slots=True)
class LongScaling:
    """A factor for each frequency, from one of two lists (LongRoPE: Ding et al., 2024).

    transformers uses the long list once a sequence exceeds the original length, and computes all of its keys again.
    Here max_model_len decides the list once, as in vLLM: keys in the cache must stay valid.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    attention_factor: float

    def is_long(self, max_model_len: int) -> bool:
        """Return whether the long list applies."""
        return max_model_len > self.original_max_position

    def frequencies(self, theta: float, size: int, max_model_len: int) -> Tensor:
        chosen = self.long_factor if self.is_long(max_model_len) else self.short_factor
        return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * _powers(theta, size))


@dataclass(frozen=True, slots=True)
class LongScalingOfTwo(LongScaling):
    """With another factor of cos and sin for the short list (Phi-3.5-MoE)."""

    short_attention_factor: float

    def attention_factor_for(self, max_model_len: int) -> float:
        """Return the factor of cos and sin."""
        return self.attention_factor if self.is_long(max_model_len) else self.short_attention_factor


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A theta that grows with the length of a sequence beyond the original length (dynamic NTK).

    Its frequencies depend on the length, not only on the model: see `layers.rope.DynamicRotary`.
    """

    factor: float
    original_max_position: int
    attention_factor: float = 1.0

    def frequencies_at(self, theta: float, size: int, lengths: Tensor) -> Tensor:
        """Return [rows, size / 2] fp32 radians per position for sequences of these lengths [rows] int64."""
        share = lengths.float().mul(self.factor).div(self.original_max_position).sub(self.factor - 1)
        longer = lengths > self.original_max_position
        bases = torch.where(longer, _power(share.where(longer, 1.0), size / (size - 2)).mul(theta), theta)
        return _power(bases[:, None], _exponents_on(size, lengths.device)).reciprocal()


StaticScaling = NoScaling | ProportionalScaling | LinearScaling | Llama3Scaling | YarnScaling | LongScaling
Scaling = StaticScaling | DynamicScaling
