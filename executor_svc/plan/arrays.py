"""The array types of plans and batches, and checks of columns of a plan.

All checks raise InvalidPlan with a message that begins with `what`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza_common.plan.errors import InvalidPlan

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


def ints(column: Sequence[int] | IntArray) -> IntArray:
    """Return a column of a plan as [n] int64; a buffer that came off the wire is not copied."""
    return np.asarray(column, np.int64)


def column(values: NDArray[np.integer[Any]]) -> array[int]:
    """Return [n] integers as a column of a result."""
    made = array("q")
    made.frombytes(np.ascontiguousarray(values, np.int64).tobytes())
    return made


def float_column(values: NDArray[np.floating[Any]]) -> array[float]:
    """Return [n] float32 values as a column of a result."""
    made = array("f")
    made.frombytes(np.ascontiguousarray(values, np.float32).tobytes())
    return made


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
