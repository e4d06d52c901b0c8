"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434): the operations of a device.

The cache has one row for a token, whatever the number of heads: its *latent*, normalized, and a key that is rotated.
Queries come into the space of latents (`absorb`), where keys and values are the latents themselves; what a head found
there becomes its values (`expand`). All rows are computed in this form, prompts too, so that a row's bits depend on it
alone.

Sizes: T tokens of the step, H heads, L numbers of a latent, R of the rotated key, N columns of a query that are not
rotated (R follow), V of a head's values; LP: L rounded up to whole 16s, P: LP + R likewise.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Kernels, KVScales, Rope

_MULTIPLE = 16


def padded_latent(latent: int) -> int:
    """Return LP: the columns of a latent in the cache, on every device."""
    return -(-latent // _MULTIPLE) * _MULTIPLE


def latent_columns(latent: int, rope: int) -> int:
    """Return P: the columns of a row of the cache, on every device."""
    return padded_latent(padded_latent(latent) + rope)


def latent_shape(num_heads: int, latent: int, rope: int, scale: float) -> AttentionShape:
    """Return the shape of attention in the space of latents."""
    return AttentionShape(num_heads, 1, latent + rope, latent_columns(latent, rope), scale, latent=latent)


class HeadLinear(Protocol):
    """A dense weight for each head, prepared for this device: heads map their own [T, in] to [T, out]."""

    num_heads: int
    in_features: int
    out_features: int


@runtime_checkable
class LatentKernels(Kernels, Protocol):
    """The operations of latent attention. `device.reference` defines each; shapes are those of `latent_shape`."""

    def head_linear(self, weight: Tensor) -> HeadLinear:
        """Prepare weights [H, out_features, in_features], on the device, in the model's dtype."""
        ...

    def write_latents(
        self,
        kv: Tensor,
        norm: Tensor,
        eps: float,
        rope: Rope,
        kv_layer: Tensor,
        shape: AttentionShape,
        plan: AttentionPlan,
        scales: KVScales | None = None,
        table: int = 0,
    ) -> None:
        """Normalize latents, rotate the keys beside them, and write each token's row to the cache.

        Args:
            kv: [T, L + R], perhaps columns of wider rows: a latent, normalized as by `rms_norm`, and the key. May be
            overwritten.
            norm: [L]
            rope: as in `Kernels.rope_write_kv`, for R columns.
            kv_layer: [N, 2, 1, B, P], both halves the same memory, written at the plan's slots. A row is the latent in
            columns 0 to L - 1, the key from LP on, and zeros elsewhere; the order within a block is device-specific.
            scales: only for a cache in fp8, whose rows have the scale of keys; None: 1.
            table: as in `Kernels.rope_write_kv`.
        """
        ...

    def latent_attention(
        self,
        q: Tensor,
        rope: Rope,
        absorb: HeadLinear,
        expand: HeadLinear,
        kv_layer: Tensor,
        shape: AttentionShape,
        plan: AttentionPlan,
        scales: KVScales | None = None,
        table: int = 0,
    ) -> Tensor:
        """Causal attention of queries [T, H * (N + R)] over each token's own sequence in the cache: [T, H * V].

        The last R columns of a head are rotated, then all multiplied with the rope's query scale, if there is one,
        rounded as in `Kernels.rope_write_kv`. The first N become L by `absorb`, rounded: with the R they are the head's
        query of the rows of the cache. What it finds, L numbers, rounded, become its V by `expand`.

        Args:
            q: perhaps columns of wider rows; may be overwritten.
            absorb, expand: of `head_linear`, [H, L, N] and [H, V, L].
            scales, plan, table: as in `Kernels.attention`.
        """
        ...
