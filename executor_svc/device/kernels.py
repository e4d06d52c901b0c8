"""The operations of a device that model layers use: one method per operation, the same for every device.

Sizes: T tokens of the step, S sequences, H query heads, KVH key and value heads, D head size, DP padded head size,
B block size, N blocks of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

GatedActivation = Literal["silu", "gelu_tanh"]
FactorActivation = Literal["gelu_tanh", "sigmoid"]
"""Of numbers that are then multiplied with others."""
PlainActivation = Literal["gelu", "gelu_tanh", "relu", "relu2", "xielu"]
"""gelu, its tanh form, relu, its square (So et al., 2021), and xIELU (Huang and Schlag, 2024)."""


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
    """At least 1: a token at position p attends to positions above p - window up to p; None: to all up to p."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the mask; None: no softcap."""
    chunk: int | None = None
    """At least 1, without a window: a token at position p attends from the multiple of this at or before p on."""
    latent: int | None = None
    """Columns of a key that are its value too, as `device.latent` has them; None: values are numbers of their own."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class Rope(NamedTuple):
    """Rotary embedding of a step's tokens: tables of angles, and each token's row in them."""

    cos: Tensor
    """[P, R] cosines; R is even and at most D, 0: nothing is rotated. In the model's dtype both products are rounded,
    then their sum; in fp32, with a narrower model, the sum alone."""
    sin: Tensor
    """[P, R] sines, the first half of each row negated."""
    rows: Tensor
    """[T] int64: each token's row of cos and sin."""
    query_scales: Tensor | None = None
    """[P] in the model's dtype or fp32: what queries are multiplied with after the rotation, by row; None: nothing."""


HeadNormKind = Literal["heads", "heads after rope", "all heads"]
"""Of each head, before or after the rotary embedding; of all heads together, before it."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of query and key heads over their first D columns."""

    q: Tensor
    """[D], shared by all heads; its dtype, as that of k, has the meaning described in `Kernels.rms_norm`. Of all heads
    together [H * DP], with zeros for the columns from D on."""
    k: Tensor
    eps: float
    kind: HeadNormKind = "heads"
    v: Tensor | None = None
    """Of values, in the dtype of q: [DP], with zeros for the columns from D on; None: they stay. Not of all heads."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of keys and values in fp8: value = stored * scale. [KVH] float32 each, one per head."""

    k: Tensor
    v: Tensor


class WeightRows(Protocol):
    """The weight of a linear, read when a device needs it. `whole` or `blocks` is used, once."""

    shape: tuple[int, int]
    """[out_features, in_features]."""
    dtype: torch.dtype

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[Tensor]:
        """Yield consecutive rows on the CPU, some num_bytes at a time, in multiples of `multiple` where that can be.

        A block is valid until the next one. Raises LoaderError if a file cannot be read.
        """
        ...

    def whole(self) -> Tensor:
        """Return the weight on the device."""
        ...


class Embedding(Protocol):
    """A table of rows by token, prepared for this device."""

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        """Return the tokens' rows times scale, [T, hidden], for token_ids [T] int64."""
        ...


class Linear(Protocol):
    """A weight prepared for this device: maps [rows, in_features] to [rows, out_features]."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias for contiguous x, in the dtype of x; out_dtype float32: unrounded, as float32."""
        ...


@runtime_checkable
class GatedLinear(Protocol):
    """A linear that can be given gate and up in place of what an activation makes of them."""

    def of_gated(self, gate_up: Tensor, activation: GatedActivation) -> Tensor:
        """Return the linear of activation(gate) * up for gate_up [T, 2 * in_features]; the bits are the same."""
        ...


class AttentionPlan(Protocol):
    """Data computed once per step and shared by all layers of one attention shape; specific to the device."""

    name: str
    """The name of its number of tiles in `Program.run`."""

    num_tiles: int
    """The units of attention's work in the current step: tiles of queries, or some of their KV heads."""

    def fill(self, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
        """Set the step; arguments as in `forward_batch.ForwardBatch`, with as many block tables as the plan has.

        With a window, attention does not read the blocks that lie wholly before the window of a sequence's first token:
        their entries may be any valid block, with any content.
        """
        ...


class Program(Protocol):
    """Recorded operations."""

    def run(self, **counts: int) -> None:
        """Run the operations on the first rows of the tensors that they were recorded with.

        counts: each number of rows by its name in the recording, and each plan's number of tiles by the plan's name.
        """
        ...


class Recording(Protocol):
    """A recording in progress."""

    rows: str
    """Name of the number of rows of the operations that follow, "rows" at first; may change during the recording."""

    def program(self) -> Program:
        """Return the recorded operations, ready to run."""
        ...


class Kernels(Protocol):
    """The operations of a transformer layer. `device.reference` defines each."""

    @property
    def name(self) -> str:
        """Name and version of the kernels; part of the numerics fingerprint."""
        ...

    def padded_head_size(self, head_size: int) -> int:
        """Return the head size of q, k, v and the cache on this device."""
        ...

    def new_attention_plan(
        self,
        shape: AttentionShape,
        max_model_len: int,
        max_tokens: int,
        max_seqs: int | None = None,
        num_tables: int = 1,
    ) -> AttentionPlan:
        """Return a plan for steps of at most max_tokens tokens and max_seqs sequences (None: max_tokens).

        num_tables: block tables of a sequence; layers with one shape may lie in pages of different ones.
        """
        ...

    def recording(self) -> AbstractContextManager[Recording]:
        """Record operations instead of running them.

        Results are in memory that is kept. The same operation on the same shape, with the same name of its rows, always
        has the same result memory.
        """
        ...

    def embed(self, table: Tensor, token_ids: Tensor, scale: float) -> Tensor:
        """Return table[token_ids] * scale, [T, hidden], for table [vocabulary, hidden] and token_ids [T] int64."""
        ...

    def take_rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return table[ids], [R, columns], for ids [R] int64."""
        ...

    def new_rows(self, name: str, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return memory [num_rows, columns] for `copy_columns`; in a recording the same for the same name and size."""
        ...

    def copy_columns(self, source: Tensor, from_column: int, target: Tensor, to_column: int, columns: int) -> Tensor:
        """Copy `columns` columns of source [T, any] to those of target [T, any] from to_column on; return target."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize rows of x [T, hidden] by their root mean square, in fp32, and multiply by weight [hidden].

        A weight in the dtype of x multiplies rows after their rounding (Llama); a weight in fp32, with a narrower x,
        multiplies before the rounding (Gemma).
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x * scale + residual), x * scale + residual); may write into x and residual."""
        ...

    def add(self, x: Tensor, residual: Tensor, scale: float = 1.0, factor: Tensor | None = None) -> Tensor:
        """Return x * scale + residual, then times factor [1] in the dtype of x; may write into x and residual."""
        ...

    def add_normed_groups(
        self, x: Tensor, into: Tensor, weight: Tensor, eps: float, before: float, after: float
    ) -> Tensor:
        """Return (norm(x * before) + into) * after for x and into [T, G * P], rounded after each operation.

        Each P columns of x are normalized with weight [P], as by `rms_norm`. May write into x; writes into `into`.
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Normalize rows of x [T, hidden] by mean and variance, times weight plus bias [hidden] fp32; rounded once."""
        ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return (layer_norm(x * scale + residual), x * scale + residual); may write into x and residual."""
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
        table: int = 0,
    ) -> Tensor:
        """Normalize q and k if norms are given, rotate them, write k and v to the cache, return q.

        Args:
            qkv: [T, (H + 2 KVH) * DP], rows whole heads apart; may be overwritten. With (H + KVH) heads the values are
            the keys before their norm and rotation; with H alone nothing is written to the cache.
            rope: in the dtype of qkv; only the first R columns of a head are rotated.
            kv_layer: [N, 2, KVH, B, DP], written at the plan's slots; the order within a head is device-specific.
            scales: only for a cache in fp8; None: 1.
            table: the plan's block table that names the layer's pages.

        Returns: q [T, H, DP].
        """
        ...

    def attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        shape: AttentionShape,
        plan: AttentionPlan,
        scales: KVScales | None = None,
        sinks: Tensor | None = None,
        table: int = 0,
    ) -> Tensor:
        """Causal attention of q [T, H, DP] over each token's own sequence in the cache: [T, H * DP].

        The shape's window and softcap apply. plan must be a plan for this shape; scales must equal the scales of the
        writes. sinks: [H] float32, one more score of each head, which has a weight and no value; None: none.
        table: as in `rope_write_kv`.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up of gate_up [T, 2 * intermediate] as [T, intermediate]."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, with the tanh form of gelu, of gate_up [T, 2 * intermediate] as [T, intermediate]."""
        ...

    def activate(self, x: Tensor, name: PlainActivation, scalars: Tensor | None = None) -> Tensor:
        """Return the activation of x [T, intermediate], rounded once.

        scalars: of xielu, [4] fp32: alpha_p, alpha_n, beta and eps of `device.reference.xielu`.
        """
        ...

    def activate_times(self, x: Tensor, factors: Tensor, from_column: int, name: FactorActivation) -> Tensor:
        """Return the activation of x [T, width], rounded, times as many columns of factors [T, any].

        Rows of x may have any stride.
        """
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the lowest id [R] int64 among the largest of each row of logits [R, vocabulary] float32.

        -1 for a row that holds NaN or +inf, or nothing but -inf.
        """
        ...

    def finish_logits(self, logits: Tensor, dtype: torch.dtype, divisor: float, cap: float | None) -> Tensor:
        """Return cap * tanh(logits / divisor / cap) of logits [R, vocabulary] float32; may write into them.

        Rounds to dtype after each operation. Divisor 1 and cap None leave out these operations.
        """
        ...


class TableEmbedding:
    """Implements `Embedding` by `Kernels.embed`, with a table that is a tensor of its own."""

    def __init__(self, table: Tensor, kernels: Kernels) -> None:
        """table: [vocabulary, hidden], on the device."""
        self._table = table
        self._kernels = kernels

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        return self._kernels.embed(self._table, token_ids, scale)
