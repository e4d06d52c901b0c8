"""What a device offers to the layers: one method per operation, the same for every device.

Names of sizes: T tokens of the step, S sequences, H query heads, KVH key and value heads, D head size, DP padded head
size, B block size, N blocks of the pool.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of attention that do not change while a model is served."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    padded_head_size: int
    """Head size in q, k, v, the cache and the attention's output; columns from head_size on are zero."""
    scale: float
    """Scores are multiplied by this."""
    window: int | None = None
    """At least 1: a token at position p sees only positions above p - window up to its own; None: all up to its own."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the mask; None: they stay."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class Rope(NamedTuple):
    """Rotary embedding of a step's tokens: where each finds its angles."""

    cos: Tensor
    """[P, R] cosines, in the model's dtype; R is even and at most D."""
    sin: Tensor
    """[P, R] sines, the first half of each row negated."""
    rows: Tensor
    """[T] int64: the row of cos and sin that each token takes."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of query and key heads over their first D columns, before the rotary embedding."""

    q: Tensor
    """[D], shared by all heads; it and k follow the rule of `Kernels.rms_norm`."""
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class KVScales:
    """What keys and values in fp8 are multiplied with to be what was meant: [KVH] float32, one for each head."""

    k: Tensor
    v: Tensor


class Linear(Protocol):
    """A weight made ready for this device: maps [rows, in_features] to [rows, out_features]."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias of contiguous x, rounded to its dtype; out_dtype float32: as floats even so."""
        ...


class AttentionPlan(Protocol):
    """What is worked out once per step and every layer of one attention shape uses; each device has its own."""

    name: str
    """Names the number of its tiles to a program."""

    num_tiles: int
    """Of the step that it holds: what attention's work is counted in."""

    def fill(self, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
        """Take a step: arguments as in `input_batch.ForwardBatch`.

        With a window, blocks wholly before the one of a sequence's first token are not needed: their entries may be
        any valid block, with any content.
        """
        ...


class Program(Protocol):
    """Recorded operations."""

    def run(self, **counts: int) -> None:
        """Run them on the first rows of the tensors that they were recorded with.

        Given are the number of rows, by the name that it had in the recording, and each plan's number of tiles, by its.
        """
        ...


class Recording(Protocol):
    """Operations as they are recorded."""

    rows: str
    """What the number of rows of the following operations is called, "rows" at first; may be changed on the way."""

    def program(self) -> Program:
        """Return what has been recorded, ready to run."""
        ...


class Kernels(Protocol):
    """The operations of a transformer layer. Meaning of each: `kernels.reference`."""

    @property
    def name(self) -> str:
        """Names the kernels and their version; part of the numerics fingerprint."""
        ...

    def padded_head_size(self, head_size: int) -> int:
        """Return the head size that q, k, v and the cache have on this device."""
        ...

    def new_attention_plan(
        self, shape: AttentionShape, max_model_len: int, most_tokens: int, most_seqs: int | None = None
    ) -> AttentionPlan:
        """Return a plan, to be filled for each step of at most so many tokens and sequences (None: as tokens)."""
        ...

    def recording(self) -> AbstractContextManager[Recording]:
        """Record operations instead of running them.

        Results are in memory that is kept: of the same operation on the same shape, counted by the same name, it is the
        same each time.
        """
        ...

    def embed(self, table: Tensor, token_ids: Tensor, scale: float) -> Tensor:
        """Return table[token_ids] * scale, [T, hidden], for table [vocabulary, hidden] and token_ids [T] int64."""
        ...

    def take_rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return table[ids], [R, columns], for ids [R] int64."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize rows of x [T, hidden] by their root mean square, in fp32, and multiply by weight [hidden].

        A weight in the dtype of x multiplies rows that are rounded to it (Llama), one in fp32 while x is narrower
        multiplies before the rounding (Gemma).
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x * scale + residual), x * scale + residual); may write into x and residual."""
        ...

    def add(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
        """Return x * scale + residual; may write into x and residual."""
        ...

    def rope_write_kv(
        self,
        qkv: Tensor,
        rope: Rope,
        kv_layer: Tensor,
        shape: AttentionShape,
        plan: AttentionPlan,
        norms: HeadNorms | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Normalize q and k where norms are given, rotate them, write k and v to the cache, return q.

        Args:
            qkv: [T, (H + 2 KVH) * DP]; may be overwritten.
            rope: in the dtype of qkv; only the first R columns of a head are rotated, the others stay.
            kv_layer: [N, 2, KVH, B, DP], written at the plan's slots, in an order of the device's own within a head.
            scales: for a cache in fp8 alone, where None is 1.

        Returns: q [T, H, DP].
        """
        ...

    def attention(
        self, q: Tensor, kv_layer: Tensor, shape: AttentionShape, plan: AttentionPlan, scales: KVScales | None = None
    ) -> Tensor:
        """Causal attention of q [T, H, DP] over each token's own sequence in the cache: [T, H * DP].

        The shape's window and softcap apply; plan must be made for this very shape. Scales are those of the writes.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up of gate_up [T, 2 * intermediate] as [T, intermediate]."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, with the tanh form of gelu, of gate_up [T, 2 * intermediate] as [T, intermediate]."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the lowest id [R] int64 among the largest of each row of logits [R, vocabulary] float32.

        -1 for a row that holds NaN or +inf, or nothing but -inf.
        """
        ...

    def finish_logits(self, logits: Tensor, dtype: torch.dtype, divisor: float, cap: float | None) -> Tensor:
        """Return cap * tanh(logits / divisor / cap) of logits [R, vocabulary] float32; may write into them.

        Rounded to dtype after each operation. Divisor 1 and cap None: these operations are not there.
        """
        ...
