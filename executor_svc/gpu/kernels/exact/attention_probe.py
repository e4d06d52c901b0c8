"""Compares rows of exact attention with themselves in other batches, to the bit, on the GPU at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor_svc.device.interface import NumericsError
from executor_svc.device.kernels import AttentionShape
from executor_svc.device.latent import padded_latent
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import AttentionKind, heads_of_block
from executor_svc.gpu.kernels.exact.attention import exact_attention, most_segments, new_scratch
from executor_svc.gpu.kernels.exact.attention_config import SEGMENT_KEYS, exact_config

_LENGTH = 2 * SEGMENT_KEYS + 45
"""Tokens of a sequence: two whole segments, and one that ends within a tile."""
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class ProbedDevice:
    """The GPU on which attention is compared."""

    device: torch.device
    arch: int
    num_sms: int


class AttentionProbe:
    """Compares a sequence's rows as of a prompt with those of chunks and decodes."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype, where: ProbedDevice) -> None:
        """Draw a sequence, its blocks in reverse order."""
        self._shape, self._where = shape, where
        width, heads, device = shape.padded_head_size, shape.num_kv_heads, where.device
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device)

        self._q = (drawn(_LENGTH, shape.num_heads, width) * 2).to(dtype)
        num_blocks = -(-_LENGTH // _BLOCK)
        halves = 1 if shape.latent is not None else 2
        cache = drawn(num_blocks, halves, heads, _BLOCK, width).to(kv_dtype)
        if shape.latent is not None:
            self._q[..., shape.latent : padded_latent(shape.latent)] = 0
            bits = cache.view(torch.uint8 if kv_dtype.itemsize == 1 else kv_dtype)
            bits[..., shape.latent : padded_latent(shape.latent)] = 0
        self._cache = cache.expand(num_blocks, 2, heads, _BLOCK, width)
        self._table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32, device=device)[None]
        ones = torch.ones(heads, dtype=torch.float32, device=device)
        self._scales = ones if kv_dtype != dtype else None
        self._scratch = new_scratch(shape.num_heads, heads, width, most_segments(_LENGTH), where.num_sms, device)

    def run(self) -> bool:
        """Return whether prompts may have wide tiles.

        Raises NumericsError if a row depends on its chunk, on its place or on how its segments are shared.
        """
        whole = self._rows(0, _LENGTH)
        last = _LENGTH - 1
        for name, first, count, parts in (
            ("alone", last, 1, 1), ("in shared segments", last, 1, 3), ("in a chunk", SEGMENT_KEYS - 7, 61, 1),
            ("beside a draft", last - 1, 2, 2),
        ):  # fmt: skip
            if not torch.equal(self._rows(first, count, parts), whole[first : first + count]):
                raise NumericsError(
                    f"attention of {self._shape.num_heads} heads of {self._shape.head_size}: a row has other bits "
                    f"{name}; this GPU cannot guarantee exact numerics, use --numerics fast"
                )
        return torch.equal(self._rows(0, _LENGTH, wide=True), whole)

    def _rows(self, first: int, count: int, parts: int = 1, wide: bool = False) -> Tensor:
        """Return the bits of rows first to first + count - 1, as tokens of one batch: a decode, or a chunk."""
        shape, device = self._shape, self._where.device
        columns = shape.padded_head_size if shape.latent is None else shape.latent
        q = self._q[first : first + count]
        call = AttentionCall(
            q,
            self._cache,
            torch.tensor([0, count], dtype=torch.int32, device=device),
            torch.tensor([first + count], dtype=torch.int32, device=device),
            self._table,
            q.new_full((count, shape.num_heads * columns), float("nan")),
            shape.scale,
            count,
            _LENGTH,
            shape.window,
            shape.softcap,
            self._scales,
            self._scales,
            chunk=shape.chunk,
            latent=shape.latent,
        )
        exact_attention(call, self._where.arch, self._scratch, self._where.num_sms, wide, parts)
        return call.out.view(torch.int32 if call.out.dtype == torch.float32 else torch.int16)


class ExactAttention:
    """What exact attention has found out about the GPU at hand, by its shapes."""

    def __init__(self, device: torch.device, arch: int, num_sms: int) -> None:
        self._where = ProbedDevice(device, arch, num_sms)
        self.dtypes = torch.bfloat16, torch.bfloat16
        """Of queries and of the cache."""
        self._found: dict[tuple[object, ...], bool] = {}

    def may_be_wide(self, shape: AttentionShape) -> bool:
        """Return whether prompts have wide tiles, which is found out once for a shape; never under the interpreter.

        Raises NumericsError if this GPU does not keep a row's bits, or if the heads of a KV head do not fit a tile.
        """
        self._check(shape)
        if self._where.device.type != "cuda":
            return False
        key = replace(shape, scale=1.0), self.dtypes
        if key not in self._found:
            self._found[key] = AttentionProbe(shape, *self.dtypes, self._where).run()
        return self._found[key]

    def _check(self, shape: AttentionShape) -> None:
        dtype, kv_dtype = self.dtypes
        latent = shape.latent is not None
        group = heads_of_block(shape.num_heads, dtype) if latent else shape.group
        columns = shape.latent or shape.padded_head_size
        kind = AttentionKind(columns, dtype, kv_dtype, _BLOCK, group, more=16 if latent else 0)
        for one_tile in (True, False):
            try:
                exact_config(kind, one_tile, self._where.arch)
            except ValueError as error:
                raise NumericsError(f"--numerics exact is not possible for this model: {error}; use fast") from error
