"""The checked arguments of attention, the same for both of its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from executor_svc.device.latent import padded_latent
from executor_svc.gpu.kernels.attention.config import (
    BLOCK_SIZES,
    HEAD_SIZES,
    MOST_ROWS,
    AttentionConfig,
    AttentionKind,
    Phase,
    attention_config,
    constants,
    heads_of_block,
    padded,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Causal attention of T tokens of S sequences over the paged cache, as defined by `device.reference.attention`."""

    q: Tensor
    """[T, H, D]; the stride of rows is any multiple of 16."""
    kv_layer: Tensor
    """[N, 2, KVH, B, D] in the dtype of q, or float8_e4m3fn with scales and a 16-bit q.

    Blocks, and the keys and the values of one, may be any number of whole rows [D] apart.
    """
    query_start_loc: Tensor
    """[S + 1] int32."""
    seq_lens: Tensor
    """[S] int32; 0: padding, whose outputs are zeros."""
    block_tables: Tensor
    """[S, max_blocks] int32, rows of any stride."""
    out: Tensor
    """[T, H * D] in the dtype of q, written for all tokens that belong to a sequence."""
    scale: float
    """Above 0."""
    max_query_len: int
    """Upper bound of each sequence's number of tokens; 1: no sequence has more than one."""
    max_seq_len: int
    """Upper bound of seq_lens."""
    window: int | None = None
    softcap: float | None = None
    k_scale: Tensor | None = None
    """[KVH] float32: scales of keys in fp8."""
    v_scale: Tensor | None = None
    """[KVH] float32: scales of values in fp8."""
    sinks: Tensor | None = None
    """[H] float32: one more score of each head, of no value."""
    chunk: int | None = None
    """As of `device.reference.attention`; not with a window."""
    latent: int | None = None
    """Columns of a latent, in the order of `device.latent`: of the one KV head of kv_layer, whose two halves are the
    same memory. out is [T, H * latent] then."""

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads; among latents blocks of query heads, each with tiles of its own."""
        if self.latent is not None:
            return self.num_heads // heads_of_block(self.num_heads, self.q.dtype)
        return self.kv_layer.shape[2]

    @property
    def head_size(self) -> int:
        """Columns of a value."""
        return self.width if self.latent is None else self.latent

    @property
    def width(self) -> int:
        """Columns of a query and of a row of the cache."""
        return self.q.shape[2]

    @property
    def block_size(self) -> int:
        return self.kv_layer.shape[3]

    @property
    def block_rows(self) -> int:
        """Rows [D] from one block to the next."""
        return self.kv_layer.stride(0) // self.width

    @property
    def value_rows(self) -> int:
        """Rows [D] from a block's keys to its values."""
        return self.kv_layer.stride(1) // self.width

    @property
    def block_bits(self) -> int:
        """The exponent of the block size, a power of 2."""
        return self.block_size.bit_length() - 1

    @property
    def span(self) -> int:
        """The length of the window or of chunks; 0: there is neither."""
        return self.window or self.chunk or 0

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def factors(self) -> tuple[float, float]:
        """Return the factors of q k and of the capped score, both for exponents of 2; the second is 0 without a cap.

        softcap * tanh(x) equals -2 * softcap / (exp(2x) + 1), up to a constant that all scores share.
        """
        if self.softcap is None:
            return self.scale * _LOG2_E, 0.0
        return 2 * _LOG2_E * self.scale / self.softcap, 2 * _LOG2_E * self.softcap

    @property
    def kind(self) -> AttentionKind:
        window, softcap = self.window is not None or self.chunk is not None, self.softcap is not None
        return AttentionKind(
            self.head_size,
            self.q.dtype,
            self.kv_layer.dtype,
            self.block_size,
            self.group,
            window,
            softcap,
            self.num_rows < MOST_ROWS,
            self.sinks is not None,
            self.chunk is not None,
            0 if self.latent is None else self.width - padded_latent(self.latent),
        )

    @property
    def num_rows(self) -> int:
        """Rows [D] from the first block's beginning to the last one's end."""
        layer = self.kv_layer
        last = sum((size - 1) * stride for size, stride in zip(layer.shape, layer.stride(), strict=True))
        return last // self.width + 1

    def config(self, phase: Phase, arch: int) -> AttentionConfig:
        """Return the tiles of this call on a GPU of compute capability `arch`; raises ValueError."""
        return attention_config(self.kind, phase, arch)

    def constants(self, config: AttentionConfig) -> dict[str, Any]:
        """Return the constants of both kernels with these tiles."""
        return constants(self.kind, config)

    def cache(self, config: AttentionConfig) -> Tensor | TensorDescriptor:
        """Return the kernel argument for kv_layer with these tiles.

        raises ValueError if the copy engine cannot load it.

        The copy engine's view is all rows [rows, D] from the first block to the last, whatever lies between, from which
        it loads [TILE, PADDED], 0 beyond D.
        """
        if not config.copies:
            return self.kv_layer
        _need(self.block_size % config.tile == 0, "kv_layer", "must have whole tiles in a block for the copy engine")
        rows, size = self.num_rows, self.head_size
        _need(rows < MOST_ROWS, "kv_layer", "must have less than 2^31 keys and values for the copy engine")
        return TensorDescriptor(self.kv_layer, [rows, size], [size, 1], [config.tile, padded(size)])

    def check(self) -> None:
        """Raise ValueError, naming the argument, for arguments that the kernels do not support."""
        self._check_q()
        self._check_cache()
        self._check_batch()
        if self.sinks is not None:
            fits = self.sinks.dtype == torch.float32 and self.sinks.shape == (self.num_heads,)
            _need(fits and self.sinks.is_contiguous(), "sinks", "must be [H] float32")
        _need(self.scale > 0, "scale", "must be above 0")
        _need(self.softcap is None or self.softcap > 0, "softcap", "must be above 0")
        _need(self.window is None or self.window >= 1, "window", "must be at least 1")
        _need(self.chunk is None or self.chunk >= 1, "chunk", "must be at least 1")
        _need(self.window is None or self.chunk is None, "chunk", "must not be given with a window")

    def _check_q(self) -> None:
        q, out, latent = self.q, self.out, self.latent
        _need(q.dtype in _DTYPES, "q", "must be bfloat16, float16 or float32")
        if latent is None:
            _need(q.dim() == 3 and q.shape[2] in HEAD_SIZES, "q", f"must be [T, H, D] with D one of {HEAD_SIZES}")
        else:
            _need(0 < latent <= HEAD_SIZES[-1], "latent", f"must be 1 to {HEAD_SIZES[-1]}")
            fits = q.dim() == 3 and not q.shape[2] % 16 and 0 < q.shape[2] - padded_latent(latent) <= HEAD_SIZES[-1]
            _need(fits, "q", "must be [T, H, P], in whole 16s, with a latent's columns and others")
        _need(q.stride(2) == 1 and q.stride(1) == q.shape[2], "q", "must be contiguous within a token")
        _need(q.stride(0) % 16 == 0 and q.data_ptr() % 16 == 0, "q", "must have tokens at multiples of 16")
        _need(out.dtype == q.dtype and out.is_contiguous(), "out", "must be contiguous and of the dtype of q")
        _need(out.shape == (q.shape[0], q.shape[1] * self.head_size), "out", "must be [T, H * D]")
        _need(out.data_ptr() % 16 == 0, "out", "must start at a multiple of 16 bytes")

    def _check_cache(self) -> None:
        cache, scales = self.kv_layer, (self.k_scale, self.v_scale)
        _need(cache.dim() == 5 and cache.shape[1] == 2, "kv_layer", "must be [N, 2, KVH, B, D]")
        _need(cache.shape[4] == self.width, "kv_layer", "must have the head size of q")
        _need(self.latent is None or cache.shape[2] == 1, "kv_layer", "must have one KV head of latents")
        _need(self.block_size in BLOCK_SIZES, "kv_layer", f"must have a block size of {BLOCK_SIZES}")
        size, heads = self.width, self.block_size * self.width
        whole = cache.stride()[2:] == (heads, size, 1) and not any(stride % size for stride in cache.stride()[:2])
        _need(whole and cache.data_ptr() % 16 == 0, "kv_layer", "must have contiguous heads, at a multiple of 16")
        _need(self.num_heads % self.num_kv_heads == 0, "kv_layer", "must have KV heads that divide the heads of q")
        if cache.dtype != torch.float8_e4m3fn:
            _need(cache.dtype == self.q.dtype, "kv_layer", "must have the dtype of q or be float8_e4m3fn")
            _need(scales == (None, None), "k_scale", "is for a cache in float8_e4m3fn only")
            return
        _need(self.q.dtype != torch.float32, "q", "must be bfloat16 or float16 with a cache in float8_e4m3fn")
        for name, each in zip(("k_scale", "v_scale"), scales, strict=True):
            fits = each is not None and each.dtype == torch.float32 and each.shape == (cache.shape[2],)
            _need(fits and each is not None and each.is_contiguous(), name, "must be [KVH] float32")

    def _check_batch(self) -> None:
        starts, lens, tables = self.query_start_loc, self.seq_lens, self.block_tables
        for name, each in (("query_start_loc", starts), ("seq_lens", lens), ("block_tables", tables)):
            _need(each.dtype == torch.int32 and each.stride(-1) == 1, name, "must be int32, contiguous in a row")
        _need(lens.dim() == 1, "seq_lens", "must be [S]")
        _need(starts.shape == (self.num_seqs + 1,), "query_start_loc", "must be [S + 1]")
        _need(tables.dim() == 2 and tables.shape[0] == self.num_seqs, "block_tables", "must be [S, max_blocks]")
        _need(tables.shape[1] * self.block_size >= self.max_seq_len, "block_tables", "must have room for max_seq_len")
        _need(self.max_query_len >= 1, "max_query_len", "must be at least 1")


def _need(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{name} {what}")
