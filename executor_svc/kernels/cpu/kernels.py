"""The CPU's operations behind the interface that all devices share."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.cpu import attention as cpu_attention
from executor_svc.kernels.cpu import elementwise, rope
from executor_svc.kernels.cpu.attention_plan import (
    DECODE_TILE,
    LARGE_TILE,
    SMALL_TILE,
    CpuAttentionPlan,
    PlanBuilder,
)
from executor_svc.kernels.cpu.workspace import Workspace
from executor_svc.kernels.interface import AttentionPlan, AttentionShape

QUERY_TILES = (DECODE_TILE, SMALL_TILE, LARGE_TILE)

_HEAD_MULTIPLE = 16


class CpuKernels:
    """Implements `kernels.interface.Kernels`; not safe for use by two threads at once (it keeps scratch memory)."""

    def __init__(self, query_tiles: tuple[int, ...] = QUERY_TILES) -> None:
        """Take the sizes of query tiles, from `QUERY_TILES`: a single one where bmm's bits change with the size."""
        self._query_tiles = query_tiles
        self._workspace = Workspace()
        self._builders: dict[tuple[AttentionShape, int], PlanBuilder] = {}

    def use_query_tiles(self, query_tiles: tuple[int, ...]) -> None:
        """Change the sizes of query tiles, before the first step."""
        self._query_tiles = query_tiles
        self._builders.clear()

    @property
    def name(self) -> str:
        return f"cpu-1/query-tiles-{'-'.join(map(str, self._query_tiles))}"

    def padded_head_size(self, head_size: int) -> int:
        """Round up: for matrices narrower than 16 columns MKL's bits change with the number of rows (measured)."""
        return -(-head_size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE

    def plan_attention(
        self,
        shape: AttentionShape,
        block_size: int,
        slot_mapping: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
    ) -> AttentionPlan:
        builder = self._builders.get((shape, block_size))
        if builder is None:
            builder = self._builders[shape, block_size] = PlanBuilder(shape, block_size, self._query_tiles)
        return builder.build(slot_mapping, query_start_loc, seq_lens, block_tables)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return elementwise.rms_norm(residual, weight, eps), residual

    def norm_heads(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, shape: AttentionShape) -> Tensor:
        return elementwise.norm_heads(qkv, q_weight, k_weight, eps, shape)

    def rope_write_kv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, shape: AttentionShape, plan: AttentionPlan
    ) -> Tensor:
        assert isinstance(plan, CpuAttentionPlan)
        return rope.rope_write_kv(qkv, cos, sin, kv_layer, shape, plan.write_rows, plan.num_tokens)

    def attention(self, q: Tensor, kv_layer: Tensor, shape: AttentionShape, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, CpuAttentionPlan)
        return cpu_attention.attention(q, kv_layer, shape, plan, self._workspace)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.silu_mul(gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.gelu_tanh_mul(gate_up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return elementwise.softcap(x, cap)
