"""The CPU's kernels: machine code made at start for this processor and this model, without a compiler."""

from executor_svc.kernels.cpu.kernels import CpuKernels
from executor_svc.kernels.cpu.linear import CpuLinear

__all__ = ["CpuKernels", "CpuLinear"]
