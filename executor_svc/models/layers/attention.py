"""Self-attention with one fused linear for q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, HeadNorms, Kernels, KVScales, Linear, Rope
from executor_svc.device.ranks import HeadNormRanks


def pad_heads(weight: Tensor, head_size: int, padded_head_size: int) -> Tensor:
    """Widen each head of weight [heads * head_size, …] to padded_head_size rows; the new rows are zero."""
    if head_size == padded_head_size:
        return weight
    heads = weight.view(-1, head_size, *weight.shape[1:])
    padded = heads.new_zeros(heads.shape[0], padded_head_size, *weight.shape[1:])
    padded[:, :head_size] = heads
    return padded.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """What becomes of the rows of heads when they are read: rotated pairs become halves, gates come before all queries,
    and heads are padded."""

    head_size: int
    padded_head_size: int
    pairs: int
    """Rows of a head that are pairs; 0: none."""
    first: int = 0
    """Rows of a head before them."""
    gated: bool = False
    """Whether the rows of each head's gate follow those of its query. Then all rows are read together."""

    @property
    def is_same(self) -> bool:
        return not self.pairs and not self.is_padded and not self.gated

    @property
    def is_padded(self) -> bool:
        return self.head_size != self.padded_head_size

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows [heads * head_size, …] as [heads * padded_head_size, …]."""
        if self.pairs:
            order = torch.arange(self.head_size, device=rows.device)
            rotated = slice(self.first, self.first + self.pairs)
            order[rotated] = order[rotated].view(-1, 2).t().flatten()
            rows = rows.view(-1, self.head_size, *rows.shape[1:])[:, order].flatten(0, 1)
        if self.gated:
            rows = rows.view(-1, 2, self.head_size, *rows.shape[1:]).transpose(0, 1).flip(0).flatten(0, 2)
        return pad_heads(rows, self.head_size, self.padded_head_size)


class Attention:
    """qkv linear, norms of heads if the model has them, rotary embedding, cache write, attention, output linear.

    Where attention has a gate, the rows of gates come first in the qkv linear.
    """

    def __init__(
        self,
        shape: AttentionShape,
        qkv: Linear,
        output: Linear,
        norms: HeadNorms | None,
        scales: KVScales | None,
        kernels: Kernels,
        sinks: Tensor | None = None,
        gated: bool = False,
        ranks: HeadNormRanks | None = None,
        head_gate: Linear | None = None,
    ) -> None:
        """Take the parts of a layer.

        sinks: as in `Kernels.attention`; gated: as `DecoderSpec.attention_gate`. ranks: that have all heads together,
        where the norms are of all of them. head_gate: as of `LayerNames`, with the row of a head for each column.
        """
        self.shape = shape
        self.qkv = qkv
        self.output = output
        self.norms = norms
        self._scales = scales
        self._kernels = kernels
        self._sinks = sinks
        self._gate_columns = shape.num_heads * shape.padded_head_size if gated else 0
        self._ranks = ranks
        self._head_gate = head_gate

    @property
    def is_plain(self) -> bool:
        """Whether it has no sinks, gates, scales of keys and values, and ranks."""
        others = self._scales, self._sinks, self._ranks, self._head_gate
        return not self._gate_columns and all(each is None for each in others)

    def __call__(self, x: Tensor, rope: Rope, kv_layer: Tensor, plan: AttentionPlan, table: int = 0) -> Tensor:
        """Return [T, hidden] for x [T, hidden]; write this step's keys and values, if it has its own, to kv_layer.

        table: as in `Kernels.rope_write_kv`.
        """
        kernels, qkv, norms = self._kernels, self.qkv(x), self.norms
        gates, qkv = qkv[:, : self._gate_columns], qkv[:, self._gate_columns :]
        if self._ranks is not None and norms is not None:
            qkv, norms = self._ranks.norm_all_heads(qkv, norms, self.shape), None
        q = kernels.rope_write_kv(qkv, rope, kv_layer, self.shape, plan, norms, self._scales, table)
        attended = kernels.attention(q, kv_layer, self.shape, plan, self._scales, self._sinks, table)
        if self._gate_columns:
            attended = kernels.activate_times(gates, attended, 0, "sigmoid")
        if self._head_gate is not None:
            attended = kernels.activate_times(self._head_gate(x), attended, 0, "sigmoid")
        return self.output(attended)


def pad_output(weight: Tensor, shape: AttentionShape) -> Tensor:
    """Widen an output weight [hidden, H * D] to [hidden, H * DP]."""
    return pad_heads(weight.t(), shape.head_size, shape.padded_head_size).t().contiguous()
