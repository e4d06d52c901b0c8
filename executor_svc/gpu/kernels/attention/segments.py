"""How the keys of few sequences are shared among a GPU's programs: the numbers that a launch is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from executor_svc.gpu.kernels.attention.config import DRAFTS_ROWS, AttentionKind

MAX_SEGMENTS = 128
"""Maximum segments of a sequence: all their weights are held at once to merge them."""
_MAX_PROGRAMS_PER_SM = 4


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments depend on a sequence's length, the model and the GPU; the number of programs on the batch too."""

    least_keys: int = 128
    """Minimum keys of a segment: its results are small compared to these keys."""
    programs_per_sm: int = 2
    """Target number of programs per SM: as many as run at once."""
    most: int = MAX_SEGMENTS
    """Maximum segments of a sequence; a power of 2."""
    split_below: int = _MAX_PROGRAMS_PER_SM
    """A batch is split as long as two programs for each of its KV heads are no more than so many for each SM."""

    def max_segments(self, num_kv_heads: int, num_sms: int) -> int:
        """Return the maximum segments of a sequence, a power of 2 with which one sequence fills the GPU."""
        fills = max(1, self.programs_per_sm * num_sms // num_kv_heads)
        return min(self.most, 1 << (fills.bit_length() - 1))

    def parts(self, num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
        """Return the number of programs that share the segments of a sequence's KV head."""
        heads = num_seqs * num_kv_heads
        least = 2 if 2 * heads <= self.split_below * num_sms else 1
        wanted = max(least, self.programs_per_sm * num_sms // heads)
        return min(wanted, self.max_segments(num_kv_heads, num_sms))

    def wants_split(
        self, num_seqs: int, num_kv_heads: int, max_query_len: int, max_seq_len: int, num_sms: int, tile_tokens: int = 1
    ) -> bool:
        """Return whether to split a batch: decodes too few to fill a GPU, and long enough.

        tile_tokens: tokens of a sequence that fit a tile, as of `split_tokens`.
        """
        fits = 1 <= max_query_len <= tile_tokens and max_seq_len > self.least_keys and num_seqs > 0
        has_scratch = num_seqs * max_query_len <= self.max_tokens(num_kv_heads, num_sms)
        return fits and has_scratch and self.parts(num_seqs, num_kv_heads, num_sms) > 1

    def max_tokens(self, num_kv_heads: int, num_sms: int) -> int:
        """Return the most tokens of a batch that is split: as many as sequences of one token, in the same memory."""
        return self.split_below * num_sms // (2 * num_kv_heads)


SEGMENTS = Segments()
"""Measured on an H200 with a bf16 cache: `tune-split` in benchmarks/results/gpu_kernels.jsonl."""
FP8_SEGMENTS = Segments(programs_per_sm=4)
"""For caches in fp8: some of their tiles have 2 warps only, and they were never measured with fewer programs."""
LATENT_SEGMENTS = Segments(programs_per_sm=1, most=64, split_below=2)
"""Among latents, whose tiles have the shared memory of an SM; not measured."""


def default_segments(kind: AttentionKind) -> Segments:
    """Return the default numbers."""
    if kind.more:
        return LATENT_SEGMENTS
    return FP8_SEGMENTS if kind.scales else SEGMENTS


@dataclass(frozen=True, slots=True)
class SegmentScratch:
    """Memory of split attention, in use only until the next kernel of the stream."""

    floats: Tensor
    """Float32, of any contents."""
    counters: Tensor
    """Int32, 0 before and after each launch: a number of programs for each sequence and KV head."""

    @classmethod
    def of(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        num_sms: int,
        device: torch.device,
        segments: Segments = FP8_SEGMENTS,
    ) -> Self:
        """Allocate what any batch with `Segments.wants_split` needs at most; by default with any cache."""
        tokens = segments.max_tokens(num_kv_heads, num_sms)
        size = tokens * num_heads * segments.max_segments(num_kv_heads, num_sms) * (head_size + 2)
        return cls(
            torch.empty(size, dtype=torch.float32, device=device),
            torch.zeros(tokens * num_kv_heads, dtype=torch.int32, device=device),
        )

    @classmethod
    def of_latents(cls, latent: int, num_sms: int, device: torch.device) -> Self:
        """Allocate what any such batch needs at most among latents, with a segment for each program."""
        programs = max(LATENT_SEGMENTS.split_below, LATENT_SEGMENTS.programs_per_sm) * num_sms
        size = programs * DRAFTS_ROWS * (latent + 2)
        return cls(
            torch.empty(size, dtype=torch.float32, device=device),
            torch.zeros(programs, dtype=torch.int32, device=device),
        )

    def check(self, num_floats: int, num_counters: int) -> None:
        """Raise ValueError if it is too small, or of other dtypes."""
        for name, each, dtype, size in (
            ("floats", self.floats, torch.float32, num_floats),
            ("counters", self.counters, torch.int32, num_counters),
        ):
            if each.dtype != dtype or each.numel() < size or not each.is_contiguous():
                raise ValueError(f"scratch.{name} must be contiguous, of at least {size} {dtype}")
