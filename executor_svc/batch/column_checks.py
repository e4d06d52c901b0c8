"""Checks of columns of numbers in a plan. All raise InvalidPlan with a message that begins with `what`."""

from __future__ import annotations

import numpy as np

from executor_svc.plan.arrays import IntArray
from executor_svc.plan.plan import InvalidPlan


def check_range(values: IntArray, size: int, what: str) -> None:
    """Check that all values are in 0 to size - 1."""
    if len(values) and (values.max() >= size or values.min() < 0):
        bad = values[(values >= size) | (values < 0)][0]
        raise InvalidPlan(f"{what} {bad} is out of range: there are {size}")


def check_unique(values: IntArray, what: str) -> None:
    """Check that no value occurs twice."""
    if len(values) > 1:
        ordered = np.sort(values)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise InvalidPlan(f"{what} {ordered[1:][twice][0]} is named twice")
