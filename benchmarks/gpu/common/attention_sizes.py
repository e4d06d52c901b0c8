"""Sizes of an attention batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor_svc.device.kernels import AttentionShape


@dataclass(frozen=True, slots=True)
class Sizes:
    """A batch of sequences of equal length, and the heads of its model."""

    batch: int
    context: int
    """Keys of the last token of a sequence."""
    num_tokens: int = 1
    """Query tokens of each sequence, at the end of its context."""
    num_kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    fp8: bool = False
    block_size: int = 16

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else torch.bfloat16

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.context // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of all sequences."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_size * self.kv_dtype.itemsize

    @property
    def shape(self) -> AttentionShape:
        heads = self.num_kv_heads * self.group
        return AttentionShape(heads, self.num_kv_heads, self.head_size, self.head_size, self.head_size**-0.5)
