"""The array types of plans and batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


# One array of each type is enough: an empty array has nothing to change.
_NO_INTS: IntArray = np.zeros(0, np.int64)
_NO_FLOATS: FloatArray = np.zeros(0, np.float32)
_NO_BOOLS: BoolArray = np.zeros(0, np.bool_)


def no_ints() -> IntArray:
    """Return the empty array of integers."""
    return _NO_INTS


def no_floats() -> FloatArray:
    """Return the empty array of floats."""
    return _NO_FLOATS


def no_bools() -> BoolArray:
    """Return the empty array of flags."""
    return _NO_BOOLS
