"""The array types of plans and batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


def no_ints() -> IntArray:
    """Return an empty array of integers."""
    return np.zeros(0, np.int64)


def no_floats() -> FloatArray:
    """Return an empty array of floats."""
    return np.zeros(0, np.float32)


def no_bools() -> BoolArray:
    """Return an empty array of flags."""
    return np.zeros(0, np.bool_)
