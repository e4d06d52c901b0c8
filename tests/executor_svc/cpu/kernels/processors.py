"""Kernels as they are made for other processors, run on this one. For tests only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from executor_svc.cpu.kernels import attention, matmul
from executor_svc.cpu.kernels.codegen.compiled import has_feature

LACKING: dict[str, frozenset[str]] = {
    "this processor": frozenset(),
    "no AVX512-BF16": frozenset({"avx512bf16"}),
    "no AVX-512": frozenset({"avx512bf16", "avx512f"}),
}


def take_away(features: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels that are made from now on do without some features."""

    def lacking(name: str) -> bool:
        return name not in features and has_feature(name)

    known: Callable[[str], bool] = lacking
    for module in (matmul, attention):
        monkeypatch.setattr(module, "has_feature", known)
