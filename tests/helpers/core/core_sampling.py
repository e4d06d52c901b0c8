"""Sampling of the core from the fields of SequenceSampling, as tests write them."""

from __future__ import annotations

import dataclasses
from typing import Any

from executor_svc.plan.sampling import SequenceSampling
from executor_svc.service.convert import sampling_from_wire
from scheduler_svc.core.types import Sampling
from scheduler_svc.executors.convert import sequence_sampling

_READ_BY_CORE = {each.name for each in dataclasses.fields(Sampling)}


def core_sampling(**fields: Any) -> Sampling:
    """Those that the core reads by name, the others as values."""
    read = {name: value for name, value in fields.items() if name in _READ_BY_CORE}
    return Sampling(**read, values={name: value for name, value in fields.items() if name not in read and value})


def for_executor(sampling: Sampling) -> SequenceSampling:
    """The same as an executor reads it off the wire."""
    return sampling_from_wire(sequence_sampling(sampling, 0))
