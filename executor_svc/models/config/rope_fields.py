"""Reads the rotary embedding from config.json: `rope_parameters` since transformers 5, `rope_scaling` before."""

from __future__ import annotations

import math
from collections.abc import Callable

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.layers.rope import RopeConfig, Rounding
from executor_svc.models.layers.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoScaling,
    Scaling,
    YarnScaling,
)
from executor_svc.portable_math import log

_YARN_FAST, _YARN_SLOW = 32.0, 1.0
_MOST_MSCALE = 1e6

DEFAULT_THETA = 10_000.0
_MOST_FACTOR = 1 << 32
"""By which positions are more: their number stays one that a computer counts."""


def rope_section(config: Fields) -> Fields:
    """Return the object that describes the rotary embedding; the older form takes precedence, as in transformers."""
    older, newer = config.section("rope_scaling"), config.section("rope_parameters")
    section = older if config.get("rope_scaling") else newer
    nested = section.sections()
    if nested:
        raise section.error(nested[0], "is an object: rotary embeddings by layer type are not supported here")
    return section


def read_rope(
    rope: Fields,
    head_size: int,
    *,
    max_positions: int,
    theta: float = DEFAULT_THETA,
    original: int | None = None,
    partial: float | None = None,
    kinds: dict[str, str] | None = None,
    rounding: Rounding = "products",
    may_be_odd: bool = False,
) -> RopeConfig:
    """Return the embedding that an object describes; raises ModelConfigError naming the wrong field.

    Args:
        rope: the object, with `rope_type`, or `type` in older checkpoints, and the fields of that type.
        max_positions: max_position_embeddings.
        theta: default of `rope_theta`.
        original: original_max_position_embeddings outside the object, which takes precedence over the one in it.
        partial: the default share of a head's dimensions that is rotated; None: all dimensions, required.
        kinds: the allowed types, mapped to those of ROPE_TYPES; None: all.
        rounding: of the family; other than "products" it excludes the type dynamic.
        may_be_odd: whether an odd number n of dimensions is possible: then n + 1 rotate, by powers of 1 / n.
    """
    names = kinds or {name: name for name in ROPE_TYPES}
    field = "rope_type" if rope.text("rope_type") else "type"
    kind = rope.text(field) or "default"
    if kind not in names:
        raise rope.error(field, f"{brief(kind)} is not supported; supported: {', '.join(names)}")
    if partial is None and rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "other than 1 is not supported here")
    size = int(head_size * min(rope.number("partial_rotary_factor", partial or 1.0), _MOST_FACTOR))
    is_odd = may_be_odd and size % 2 == 1 and names[kind] == "default"
    size += is_odd
    if size % 2 or not 0 < size <= head_size:
        raise rope.error(
            "partial_rotary_factor",
            f"gives {size} rotated dimensions of head_dim {head_size}: they must be even, 2 to {head_size}",
        )
    original = original or rope.integer("original_max_position_embeddings", max_positions)
    theta = rope.number("rope_theta", theta)
    if theta <= 1 or original <= 1:
        field, value = ("rope_theta", theta) if theta <= 1 else ("original_max_position_embeddings", original)
        raise rope.error(field, f"{value:g} must be above 1")
    scaling = ROPE_TYPES[names[kind]](rope, size, max_positions, original)
    if isinstance(scaling, DynamicScaling) and rounding != "products":
        raise rope.error(field, "'dynamic' is not supported here")
    return RopeConfig(theta ** (size / (size - 1)) if is_odd else theta, size, scaling, rounding)


def _factor(rope: Fields) -> float:
    factor = rope.number("factor", at_least=1.0)
    if factor > _MOST_FACTOR:
        raise rope.error("factor", f"must be at most {_MOST_FACTOR}, not {factor:g}")
    return factor


def _default(rope: Fields, size: int, max_positions: int, original: int) -> Scaling:
    return NoScaling()


def _linear(rope: Fields, size: int, max_positions: int, original: int) -> Scaling:
    return LinearScaling(_factor(rope))


def _dynamic(rope: Fields, size: int, max_positions: int, original: int) -> Scaling:
    """Return dynamic scaling; its original length is max_position_embeddings itself."""
    if size < 4:
        raise rope.error("rope_type", f"'dynamic' needs at least 4 rotated dimensions in a head, not {size}")
    return DynamicScaling(_factor(rope), max_positions)


def _llama3(rope: Fields, size: int, max_positions: int, original: int) -> Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        raise rope.error("high_freq_factor", f"{high:g} must be at least low_freq_factor {low:g}")
    return Llama3Scaling(_factor(rope), low, high, original)


def _yarn(rope: Fields, size: int, max_positions: int, original: int) -> Scaling:
    factor = _factor(rope) if rope.get("factor") is not None else max_positions / original
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        mscale = rope.number("mscale", 0.0, at_least=0.0)
        mscale_all = rope.number("mscale_all_dim", 0.0, at_least=0.0)
        attention_factor = _mscale(factor)
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
    fast, slow = rope.number("beta_fast", _YARN_FAST), rope.number("beta_slow", _YARN_SLOW)
    if fast < slow:
        raise rope.error("beta_fast", f"{fast:g} must be at least beta_slow {slow:g}")
    return YarnScaling(factor, original, attention_factor, fast, slow, rope.flag("truncate", True))


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def score_factor(rope: Fields) -> float:
    """Return the factor of attention scores that an embedding over longer contexts has in DeepSeek's models."""
    kind, mscale = rope.text("rope_type") or rope.text("type"), rope.number("mscale_all_dim", 0.0, at_least=0.0)
    if kind in (None, "default") or not mscale:
        return 1.0
    if mscale > _MOST_MSCALE:
        raise rope.error("mscale_all_dim", f"{mscale:g} must be at most {_MOST_MSCALE:g}")
    return _mscale(_factor(rope), mscale) ** 2


def _longrope(rope: Fields, size: int, max_positions: int, original: int) -> Scaling:
    factor = rope.number("factor", max_positions / original)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + log(factor) / log(original))
    short, long = rope.numbers("short_factor", size // 2), rope.numbers("long_factor", size // 2)
    return LongScaling(short, long, original, attention_factor)


ROPE_TYPES: dict[str, Callable[[Fields, int, int, int], Scaling]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
"""The supported types, by name in config.json, with their readers."""


def context_limit(max_positions: int, rope: RopeConfig) -> int:
    """Return the maximum length of sequences, as vLLM computes it: linear, dynamic and yarn extend the original length.

    For llama3 and longrope, max_position_embeddings is already the extended length.
    """
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling | DynamicScaling):
        return int(max_positions * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return int(scaling.original_max_position * scaling.factor)
    return max_positions
