"""Kernels run on a GPU where there is one, else under Triton's interpreter, on the CPU (tests/conftest.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.executor_svc.gpu.interpreter import mended_interpreter


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors for kernels lie."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(scope="module", autouse=True)
def _interpreter_is_mended() -> Iterator[None]:
    with mended_interpreter():
        yield


class _Chain:
    """A product of the interpreter, until it is added to what `tl.dot` adds to: columns are, one after the other."""

    def __init__(self, a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> None:
        self._a, self._b = a.astype(dtype), b.astype(dtype)

    def __add__(self, before: np.ndarray) -> np.ndarray:
        total = before.copy()
        for inner in range(len(self._b)):
            total += self._a[:, inner, None] * self._b[inner]
        return total


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add products in their order, to the sum before them, as a GPU's instructions do.

    BLAS has another order for some rows of a matrix, and starts from 0 at each `tl.dot`.
    """
    monkeypatch.setattr(np, "matmul", _Chain)
