"""What each operation means, in float64 and without any concern for speed. Tests hold every device's kernels to it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019), in float64."""
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up, where gate and up are the halves of the last dimension, in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (x[i], x[i + D/2]) of x [T, heads, D] by angles [T, D/2] radians (Su et al., 2021), in float64."""
    first, second = x.double().chunk(2, -1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def write_kv(kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [T, KVH, D] to kv_layer [N, 2, KVH, B, D] at slot block * B + offset, in place."""
    block_size = kv_layer.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        kv_layer[block, 0, :, offset] = k[token].to(kv_layer.dtype)
        kv_layer[block, 1, :, offset] = v[token].to(kv_layer.dtype)


def read_kv(kv_layer: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return k and v [length, KVH, D] in float64 of the sequence whose blocks are block_table."""
    num_blocks = -(-length // kv_layer.shape[3])
    blocks = kv_layer[block_table[:num_blocks].long()].double()  # [n, 2, KVH, B, D]
    both = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return both[0], both[1]


def attention(
    q: Tensor, kv_layer: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, scale: float
) -> Tensor:
    """Return softmax(q k^T * scale) v [T, H, D] in float64, each token over the positions up to its own.

    Args:
        q: [T, H, D]; head h reads KV head h // (H / KVH).
        kv_layer: [N, 2, KVH, B, D].
        query_start_loc, seq_lens, block_tables: as in `input_batch.ForwardBatch`.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // kv_layer.shape[2]
    for s, length in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        if end == start:
            continue
        k, v = (t.repeat_interleave(group, 1) for t in read_kv(kv_layer, block_tables[s], length))
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), k) * scale
        position = torch.arange(length - (end - start), length)
        scores.masked_fill_(torch.arange(length)[None, :] > position[:, None], float("-inf"))
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out
