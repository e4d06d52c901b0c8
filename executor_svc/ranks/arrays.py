"""Columns of integers in a frame: their lengths, then their numbers, little endian."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_svc.plan.arrays import IntArray


def write_columns(*columns: IntArray) -> bytes:
    """Return columns [n] each."""
    lengths = np.array([len(column) for column in columns], "<i8").tobytes()
    return lengths + b"".join(column.astype("<i8").tobytes() for column in columns)


def read_columns(content: bytes, count: int) -> Sequence[IntArray]:
    """Reverse `write_columns`; raises ValueError for another number of them."""
    lengths = np.frombuffer(content[: 8 * count], "<i8")
    numbers = np.frombuffer(content[8 * count :], "<i8").astype(np.int64)
    if len(lengths) != count or lengths.sum() != len(numbers):
        raise ValueError(f"{len(numbers)} numbers for columns of {lengths.tolist()}")
    return np.split(numbers, lengths.cumsum()[:-1])
