"""Attention of prompts by the Gluon kernel beside that by Triton's, on random numbers, on the GPU at hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from executor_svc.device.kernels import AttentionShape
from executor_svc.gpu.kernels.attention.attention import attention
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.gluon.prefill import prompt_attention

_CHUNKS = ((0, 140), (190, 1), (200, 61), (0, 64), (0, 1))
"""Context and tokens of each sequence: tiles of keys that end within a block, at its end, and behind its first key."""
_MOST = 0.01
"""Norm of a row's difference by that of the row: some roundings of weights and results to 16 bits."""


def compare(shape: AttentionShape, dtype: torch.dtype, block_size: int, device: torch.device, arch: int) -> str | None:
    """Return what is wrong with the Gluon kernel's results for this shape, beside Triton's; None: nothing.

    What no key is in is NaN: it must not be read into any result. Raises ValueError for a shape that it does not have.
    """
    call = _random_call(shape, dtype, block_size, device)
    other = replace(call, out=torch.full_like(call.out, float("nan")))
    prompt_attention(call)
    attention(other, arch)
    found, expected = (each.out.float().view(-1, shape.padded_head_size) for each in (call, other))
    apart = float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-20)).max())
    if apart <= _MOST:
        return None
    return f"a row of a head is {apart:.3g} of its length away from Triton's, and may be {_MOST}"


def _random_call(shape: AttentionShape, dtype: torch.dtype, block_size: int, device: torch.device) -> AttentionCall:
    """Return a batch of random numbers, in blocks in random order."""
    generator = torch.Generator().manual_seed(0)
    width, lens = shape.padded_head_size, torch.tensor([before + count for before, count in _CHUNKS])
    blocks = -(-lens // block_size)
    order = torch.randperm(int(blocks.sum()) + 1, generator=generator)
    # The last block is NaN, and stands behind each sequence's own.
    tables = torch.full((len(lens), int(blocks.max()) + 1), int(order[-1]), dtype=torch.int32)
    pool = torch.randn(len(order), 2, shape.num_kv_heads, block_size, width, generator=generator).to(dtype)
    pool[order[-1]] = float("nan")
    first = 0
    for row, (length, count) in enumerate(zip(lens.tolist(), blocks.tolist(), strict=True)):
        tables[row, :count] = order[first : first + count]
        first += count
        if length % block_size:
            pool[tables[row, count - 1], :, :, length % block_size :] = float("nan")
    counts = [count for _, count in _CHUNKS]
    tokens = sum(counts)
    q = (torch.randn(tokens, shape.num_heads, width, generator=generator) * 2).to(dtype)
    return AttentionCall(
        q.to(device),
        pool.to(device),
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device),
        lens.to(torch.int32).to(device),
        tables.to(device),
        torch.full((tokens, shape.num_heads * width), float("nan"), dtype=dtype, device=device),
        shape.scale,
        max(counts),
        int(lens.max()),
        softcap=shape.softcap,
    )
