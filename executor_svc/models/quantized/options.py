"""Options that several methods of quantization share."""

from __future__ import annotations

import logging
from typing import Literal

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.quantized.name_pattern import NamePattern, PatternError

_log = logging.getLogger(__name__)

_BITS: dict[object, Literal[4, 8]] = {4: 4, 8: 8}
_LARGEST_GROUP = 1 << 24


def bits_of(fields: Fields, name: str, default: Literal[4, 8] | None = None) -> Literal[4, 8]:
    """Return the bits of a code; raises ModelConfigError for others than 4 and 8."""
    value = fields.integer(name, default)
    if value not in _BITS:
        raise fields.error(name, f"is {value}: integers of 4 and 8 bits are supported")
    return _BITS[value]


def group_of(fields: Fields, name: str) -> int | None:
    """Return the columns that share a scale, None for -1: all; raises ModelConfigError for others below 1."""
    value = fields.get(name)
    if value == -1 and not isinstance(value, bool | float):
        return None
    return fields.integer(name, at_most=_LARGEST_GROUP)


def text_of(fields: Fields, name: str, default: str, supported: tuple[str, ...]) -> str:
    """Return a field's text in lower case; raises ModelConfigError unless it is one of these."""
    value = default if fields.get(name) is None else fields.get(name)
    if not isinstance(value, str) or value.lower() not in supported:
        raise fields.error(name, f"is {brief(value)}: not supported; supported: {', '.join(supported)}")
    return value.lower()


def pattern_of(fields: Fields, name: str, text: str) -> NamePattern:
    """Return a pattern that a field holds; raises ModelConfigError if it is none, or too long."""
    try:
        return NamePattern(text)
    except PatternError as error:
        raise fields.error(name, f"has {error}") from error


def log_fp8_activations() -> None:
    """Log that activations keep the model's dtype though the checkpoint names fp8 for them."""
    _log.info("the checkpoint is made for activations in fp8; they stay in the model's dtype: weights alone are in fp8")


def texts_of(fields: Fields, name: str) -> tuple[str, ...]:
    """Return a list of texts, empty if the field is absent; raises ModelConfigError for anything else."""
    value = fields.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.error(name, f"must be a list of texts, not {brief(value)}")
    return tuple(value)
