"""The array types of plans and batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
