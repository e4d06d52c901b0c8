"""Checks of columns of numbers in a plan. All raise InvalidPlan with a message that begins with `what`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cadenza_common.plan.errors import InvalidPlan
from executor_svc.plan.arrays import IntArray, ints


def check_range(column: Sequence[int] | IntArray, size: int, what: str) -> None:
    """Check that all values are in 0 to size - 1."""
    values = ints(column)
    if len(values) and (values.max() >= size or values.min() < 0):
        bad = values[(values >= size) | (values < 0)][0]
        raise InvalidPlan(f"{what} {bad} is out of range: there are {size}")


def check_unique(column: Sequence[int] | IntArray, what: str) -> None:
    """Check that no value occurs twice."""
    if len(column) > 1:
        ordered = np.sort(ints(column))
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise InvalidPlan(f"{what} {ordered[1:][twice][0]} is named twice")
