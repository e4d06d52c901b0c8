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


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add products in their order: BLAS has another one for some rows of a matrix."""

    def in_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        total = np.zeros((len(a), b.shape[1]), dtype)
        for inner in range(len(b)):
            total += a[:, inner, None].astype(dtype) * b[inner].astype(dtype)
        return total

    monkeypatch.setattr(np, "matmul", in_order)
