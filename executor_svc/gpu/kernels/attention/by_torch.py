"""Attention by PyTorch's operations, where no kernel is right on the GPU at hand: any shape, and slow.

Keys and values are copied for each row, in float32, a few rows and some keys at a time. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.latent import padded_latent
from executor_svc.gpu.kernels.attention.call import AttentionCall

BY_TORCH = 0
"""Of a plan, in the place of the compute capability whose tiles it has."""
_ROWS, _KEYS = 32, 512
"""Of what is copied at a time: a quarter of a gigabyte with 8 KV heads of 128."""
_LEAST = -1e30


@dataclass(slots=True)
class _Sums:
    """Of some rows: the largest score, the sum of weights beside it, and that of weighted values."""

    most: Tensor
    """[R, KVH, G]"""
    weights: Tensor
    values: Tensor
    """[R, KVH, G, D]"""


def attention_by_torch(call: AttentionCall) -> None:
    """Write attention as `device.reference.attention` defines it, in float32, rounded once; rows of no sequence stay.

    Rows without a key become zeros.
    """
    kv_heads, groups = call.kv_layer.shape[2], call.num_heads // call.kv_layer.shape[2]
    for first in range(0, len(call.q), _ROWS):
        rows = torch.arange(first, min(first + _ROWS, len(call.q)), device=call.q.device)
        q = call.q[first : first + _ROWS].float().unflatten(1, (kv_heads, groups))
        if call.latent is not None:
            q[..., call.latent : padded_latent(call.latent)] = 0.0  # the key has no such columns
        sequences, positions = _places(call, rows)
        sums = _new_sums(call, q)
        for key in range(0, call.max_seq_len, _KEYS):
            keys = torch.arange(key, min(key + _KEYS, call.max_seq_len), device=rows.device)
            _add(call, sums, q, keys, sequences, positions)
        found = sums.values / sums.weights.clamp(min=1e-30)[..., None]
        out = call.out[first : first + _ROWS]
        out.copy_(torch.where((rows < call.query_start_loc[-1])[:, None], found.flatten(1).to(out.dtype), out))


def _places(call: AttentionCall, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each row and its position there, below 0 for padding."""
    starts = call.query_start_loc.long()
    sequences = torch.searchsorted(starts[1:], rows, right=True).clamp(max=call.num_seqs - 1)
    return sequences, call.seq_lens.long()[sequences] - starts[sequences + 1] + rows


def _new_sums(call: AttentionCall, q: Tensor) -> _Sums:
    most, weights = torch.full_like(q[..., 0], _LEAST), torch.zeros_like(q[..., 0])
    if call.sinks is not None:
        most.copy_(call.sinks.view(q.shape[1], -1))
        weights.fill_(1.0)
    return _Sums(most, weights, torch.zeros(*q.shape[:3], call.head_size, device=q.device))


def _add(call: AttentionCall, sums: _Sums, q: Tensor, keys: Tensor, sequences: Tensor, positions: Tensor) -> None:
    """Add what rows [R] make of these keys [K]."""
    at = positions[:, None]
    seen = keys <= at
    if call.window is not None:
        seen &= keys > at - call.window
    if call.chunk is not None:
        seen &= keys >= at // call.chunk * call.chunk
    k, v = _keys_and_values(call, keys, sequences)
    scores = torch.einsum("rhgd,rkhd->rhgk", q, k.masked_fill(~seen[..., None, None], 0.0)) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    most = torch.maximum(sums.most, scores.amax(-1))
    kept, weights = torch.exp(sums.most - most), torch.exp(scores - most[..., None])
    added = torch.einsum("rhgk,rkhd->rhgd", weights, v.masked_fill(~seen[..., None, None], 0.0))
    sums.values = sums.values * kept[..., None] + added
    sums.weights = sums.weights * kept + weights.sum(-1)
    sums.most = most


def _keys_and_values(call: AttentionCall, keys: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies [R, K, KVH, D] in float32; among latents a value is the first columns of its key."""
    layer, size = call.kv_layer, call.block_size
    blocks = (keys // size).clamp(max=call.block_tables.shape[1] - 1)
    pages = call.block_tables.long()[sequences][:, blocks].clamp(min=0)
    bits = layer.view(torch.uint8) if layer.dtype.itemsize == 1 else layer

    def read(half: int, scale: Tensor | None) -> Tensor:
        found = bits[pages, half, :, keys % size].view(layer.dtype).float()
        return found if scale is None else found * scale[:, None]

    k = read(0, call.k_scale)
    return k, read(1, call.v_scale) if call.latent is None else k[..., : call.latent]
