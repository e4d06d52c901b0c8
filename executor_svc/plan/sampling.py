"""Sampling parameters as executors store them: a number for each column of `cadenza_common.plan.sampling`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cadenza_common.plan.sampling import COLUMNS, Need, SequenceSampling
from executor_svc.portable_math import log


def _log(share: float) -> float:
    """Return the natural logarithm; -inf for 0."""
    return log(share) if share > 0 else -np.inf


_STORED: dict[str, Callable[[Any], float]] = {
    "min_p": _log,
    "top_n_sigma": lambda num_deviations: max(num_deviations, 0.0),
}
"""Parameters that are not stored as they are; None is stored as off."""


def stored_value(name: str, value: Any) -> Any:
    """Return the stored value of a parameter; None: it is off."""
    if value is None:
        return COLUMNS[name].off
    return _STORED[name](value) if name in _STORED else value


def stored(sampling: SequenceSampling) -> dict[str, Any]:
    """Return the stored value of every parameter, by the column's name."""
    return {column.name: stored_value(name, getattr(sampling, name)) for name, column in COLUMNS.items()}


def needs_of(stored: Mapping[str, Any]) -> set[Need]:
    """Return the needs of the parameters that are on, from their stored values by the column's name."""
    return {column.need for column in COLUMNS.values() if stored[column.name] != column.off}


def column_names(*needs: Need) -> list[str]:
    """Return the names of the columns whose parameters have one of these needs."""
    return [column.name for column in COLUMNS.values() if column.need in needs]


def in_warm_up(*without: Need) -> SequenceSampling:
    """Return parameters for warm-up steps: all are on together, except those with these needs."""
    return SequenceSampling(
        **{
            name: column.in_warm_up
            for name, column in COLUMNS.items()
            if column.in_warm_up is not None and column.need not in without
        }  # type: ignore[arg-type]
    )
