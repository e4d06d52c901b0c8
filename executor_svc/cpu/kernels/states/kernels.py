"""The CPU's operations of recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.cpu.kernels import activation
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.latent.kernels import CpuLatentKernels
from executor_svc.cpu.kernels.states.conv import Convolution, causal_conv
from executor_svc.cpu.kernels.states.gated_delta import delta_terms
from executor_svc.cpu.kernels.states.gated_norm import GatedNorm, gated_norm
from executor_svc.cpu.kernels.states.mamba import mamba_terms
from executor_svc.cpu.kernels.states.plan import CpuStatePlan
from executor_svc.cpu.kernels.states.recurrence import HeadKernel, recurrence
from executor_svc.cpu.kernels.states.terms import SCALARS, TermLayout
from executor_svc.cpu.kernels.tensors import addresses as _addresses
from executor_svc.cpu.kernels.tensors import dtype_of as _dtype
from executor_svc.device.states import GatedNormKind, StateMemory, StatePlan
from executor_svc.plan.state_sizes import ConvState, DeltaState, MambaState, Recurrence


class CpuStateKernels(CpuLatentKernels):
    """Implements `device.states.StateKernels`."""

    def new_state_plan(self, pages_per_state: int, tail: int, max_tokens: int, max_seqs: int) -> CpuStatePlan:
        return CpuStatePlan(pages_per_state, tail, max_seqs)

    def causal_conv(
        self,
        x: Tensor,
        from_column: int,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        memory: StateMemory,
        plan: StatePlan,
    ) -> Tensor:
        assert isinstance(plan, CpuStatePlan)
        conv = Convolution(ConvState(weight.shape[1], weight.shape[0]), plan.tail, silu, bias is not None)
        y = self._new("convolved", (x.shape[0], weight.shape[1]), x.dtype)
        kernel = causal_conv(self.code, _dtype(x), conv)
        added = 0 if bias is None else bias.data_ptr()
        arguments = (*_columns(x, from_column), *_addresses(y, weight), added, *_units(memory, plan), _table(plan))
        self._launch(KernelLaunch(kernel, plan.name, 1, conv.blocks, arguments), plan.num_tiles)
        return y

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        beta: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        shape: DeltaState,
        memory: StateMemory,
        plan: StatePlan,
    ) -> Tensor:
        vectors, scalars = self._new_terms(shape, len(qkv))
        kernel = delta_terms(self.code, _dtype(qkv), shape)
        inputs = *_columns(qkv), *_columns(gates), *_columns(beta)
        arguments = (*inputs, *_addresses(decay, dt_bias, vectors, scalars), len(qkv))
        self._launch(KernelLaunch(kernel, "rows", 1, 1, arguments), len(qkv))
        first = 2 * shape.key_heads * shape.key_size
        return self._recurrence(qkv, first, (vectors, scalars), None, shape, memory, plan)

    def mamba(
        self,
        xbc: Tensor,
        dt: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        d: Tensor,
        limits: tuple[float, float],
        shape: MambaState,
        memory: StateMemory,
        plan: StatePlan,
    ) -> Tensor:
        vectors, scalars = self._new_terms(shape, len(xbc))
        kernel = mamba_terms(self.code, _dtype(xbc), shape, limits)
        arguments = (*_columns(xbc), *_columns(dt), *_addresses(decay, dt_bias, vectors, scalars), len(xbc))
        self._launch(KernelLaunch(kernel, "rows", 1, 1, arguments), len(xbc))
        return self._recurrence(xbc, 0, (vectors, scalars), d, shape, memory, plan)

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        from_column: int,
        weight: Tensor,
        eps: float,
        group: int,
        kind: GatedNormKind,
    ) -> Tensor:
        norm = GatedNorm(kind, x.shape[1], group, weight.shape[0] != x.shape[1], eps)
        y = self._new("gated", tuple(x.shape), x.dtype)
        kernel = gated_norm(self.code, _dtype(x), _dtype(weight), norm)
        arguments = (*_columns(x), *_columns(gate, from_column), *_addresses(weight, y))
        self._launch(KernelLaunch(kernel, "rows", 1, 1, arguments), x.shape[0])
        return y

    def multiply(self, x: Tensor, factors: Tensor, from_column: int) -> Tensor:
        y = self._new("multiplied", tuple(x.shape), x.dtype)
        strides = x.stride(0), factors.stride(0)
        kernel = activation.activate_times(self.code, None, _dtype(x), x.shape[1], strides)
        arguments = (_columns(x)[0], _columns(factors, from_column)[0], y.data_ptr())
        self._launch(KernelLaunch(kernel, "rows", activation.ROWS_AT_ONCE, 1, arguments), x.shape[0])
        return y

    def _new_terms(self, shape: Recurrence, num_rows: int) -> tuple[Tensor, Tensor]:
        terms = TermLayout.of(shape)
        vectors = self._new("vectors of states", (terms.key_heads, num_rows, terms.row_vectors), torch.float32)
        return vectors, self._new("scalars of states", (terms.heads, num_rows, SCALARS), torch.float32)

    def _recurrence(
        self,
        x: Tensor,
        first: int,
        terms: tuple[Tensor, Tensor],
        d: Tensor | None,
        shape: Recurrence,
        memory: StateMemory,
        plan: StatePlan,
    ) -> Tensor:
        """Return the outputs of all heads; first: the column of x at which the values begin."""
        assert isinstance(plan, CpuStatePlan)
        heads = HeadKernel(shape, plan.tail, first)
        y = self._new("recurred", (x.shape[0], shape.num_heads * shape.unit.columns), x.dtype)
        kernel = recurrence(self.code, _dtype(x), heads)
        skip = 0 if d is None else d.data_ptr()
        arguments = (*_columns(x), *_addresses(y, *terms), len(x), skip, *_units(memory, plan), _table(plan))
        self._launch(KernelLaunch(kernel, plan.name, 1, heads.items, arguments), plan.num_tiles)
        return y


def _columns(x: Tensor, from_column: int = 0) -> tuple[int, int]:
    """Return the address of a column of rows, and the bytes from a row to the next."""
    assert x.stride(1) == 1
    return x.data_ptr() + from_column * x.element_size(), x.stride(0) * x.element_size()


def _units(memory: StateMemory, plan: CpuStatePlan) -> tuple[int, int, int]:
    """Return the arguments of `UnitPlaces`, valid during the life of the plan."""
    return memory.pool.data_ptr(), memory.pool.stride(0), plan.places(memory.pages, memory.offsets)


def _table(plan: CpuStatePlan) -> int:
    return int(plan.table.ctypes.data)
