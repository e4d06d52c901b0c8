"""Sampling of the core from the fields of SequenceSampling, as tests write them."""

from __future__ import annotations

from typing import Any

from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.plan_wire.sampling import sampling_from_wire, sampling_to_wire

_MAY_BE_ZERO = ("num_logprobs", "num_prompt_logprobs")


def core_sampling(**fields: Any) -> SequenceSampling:
    """Those fields; a list that is empty, or a number that is 0 or None, is the default."""
    return SequenceSampling(**{name: value for name, value in fields.items() if value or name in _MAY_BE_ZERO})


def for_executor(sampling: SequenceSampling) -> SequenceSampling:
    """The same as an executor reads it off the wire."""
    return sampling_from_wire(sampling_to_wire(sampling, 0))
