"""The arrays that plans and batches are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


def no_ints() -> IntArray:
    """An array of no integers."""
    return np.zeros(0, np.int64)


def no_floats() -> FloatArray:
    """An array of no floats."""
    return np.zeros(0, np.float32)


def no_bools() -> BoolArray:
    """An array of no flags."""
    return np.zeros(0, np.bool_)
