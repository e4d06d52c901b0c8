"""The operations on the CPU: vectorized PyTorch, built so that a row's bits never depend on what it is batched with."""

from __future__ import annotations

from executor_svc.kernels.cpu.attention_plan import SMALL_TILE
from executor_svc.kernels.cpu.kernels import QUERY_TILES, CpuKernels
from executor_svc.kernels.cpu.linear import CpuLinear

__all__ = ["QUERY_TILES", "SMALL_TILE", "CpuKernels", "CpuLinear"]
