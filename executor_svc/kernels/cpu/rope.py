"""Rotary position embedding on the CPU, and the write of keys and values to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.interface import AttentionShape


def rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, shape: AttentionShape, write_rows: Tensor, num_tokens: int
) -> Tensor:
    """Rotate q and k of qkv [T, (H + 2 KVH) * DP] in place, write k and v of num_tokens tokens, return q [T, H, DP].

    cos and sin are [T, R] with the first half of sin negated, for the first R columns of a head, the others stay;
    kv_layer is [N, 2, KVH, B, DP]; write_rows are rows of it seen as [-1, DP]. Rounds to the dtype after each product,
    as transformers does.
    """
    heads = qkv.view(qkv.shape[0], -1, shape.padded_head_size)
    rotated = heads[:, : shape.num_heads + shape.num_kv_heads, : cos.shape[1]]
    half = cos.shape[1] // 2
    swapped = torch.cat([rotated[..., half:], rotated[..., :half]], -1).mul_(sin[:, None])
    rotated.mul_(cos[:, None]).add_(swapped)
    new = heads[:num_tokens, shape.num_heads :].reshape(-1, shape.padded_head_size)
    kv_layer.view(-1, shape.padded_head_size).index_copy_(0, write_rows, new)
    return heads[:, : shape.num_heads]
