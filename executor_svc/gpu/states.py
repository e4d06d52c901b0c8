"""The GPU's operations of recurrent layers."""

from __future__ import annotations

from torch import Tensor

from executor_svc.device.states import GatedNormKind, StateMemory, StatePlan
from executor_svc.gpu.kernels.states import gating
from executor_svc.gpu.kernels.states.conv import causal_conv
from executor_svc.gpu.kernels.states.plan import GpuStatePlan, unit_lines
from executor_svc.gpu.kernels.states.recurrence import gated_delta, mamba
from executor_svc.gpu.latent import GpuLatentKernels
from executor_svc.plan.state_sizes import DeltaState, MambaState


class GpuStateKernels(GpuLatentKernels):
    """Implements `device.states.StateKernels`.

    The number of sequences is the plan's at each run; padding beyond a sequence's rows is left as it is.
    """

    def new_state_plan(self, pages_per_state: int, tail: int, max_tokens: int, max_seqs: int) -> GpuStatePlan:
        return GpuStatePlan(pages_per_state, tail, max_tokens, max_seqs, self._device)

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
        assert isinstance(plan, GpuStatePlan)
        units = unit_lines(memory)
        columns = x[:, from_column : from_column + weight.shape[1]]
        y = self.new("convolved", (len(x), weight.shape[1]), x.dtype)

        def run(n: int) -> None:
            where = memory.pool, units, plan.step, plan.num_tiles, plan.tail
            causal_conv(columns[:n], weight, bias, silu, *where, y[:n])

        return self.run(y, run)

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
        assert isinstance(plan, GpuStatePlan)
        units = unit_lines(memory)
        y = self.new("recurred", (len(qkv), shape.value_heads * shape.value_size), qkv.dtype)

        def run(n: int) -> None:
            where = memory.pool, units, plan.step, plan.num_tiles, plan.tail
            gated_delta(qkv[:n], gates[:n], beta[:n], decay, dt_bias, shape, *where, y[:n])

        return self.run(y, run)

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
        assert isinstance(plan, GpuStatePlan)
        units = unit_lines(memory)
        y = self.new("recurred", (len(xbc), shape.heads * shape.head_size), xbc.dtype)

        def run(n: int) -> None:
            where = memory.pool, units, plan.step, plan.num_tiles, plan.tail
            mamba(xbc[:n], dt[:n], decay, dt_bias, d, limits, shape, *where, y[:n])

        return self.run(y, run)

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
        chosen = gate[:, from_column : from_column + x.shape[1]]
        y = self.new("gated", tuple(x.shape), x.dtype)
        return self.run(y, lambda n: gating.gated_norm(x[:n], chosen[:n], weight, eps, group, kind, y[:n]))

    def multiply(self, x: Tensor, factors: Tensor, from_column: int) -> Tensor:
        chosen = factors[:, from_column : from_column + x.shape[1]]
        y = self.new("multiplied", tuple(x.shape), x.dtype)
        return self.run(y, lambda n: gating.multiply(x[:n], chosen[:n], y[:n]))
