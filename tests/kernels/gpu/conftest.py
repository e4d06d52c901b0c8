"""Runs Triton's kernels on a GPU where there is one, else under Triton's interpreter, on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

# Before any kernel is imported: the decorator decides then.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors for kernels lie."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
