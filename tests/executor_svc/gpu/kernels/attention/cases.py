"""Batches for the GPU's attention, with NaN wherever nothing may be read, and what it must give. For tests only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.latent import latent_columns, padded_latent
from executor_svc.gpu.kernels.attention.call import AttentionCall
from tests.executor_svc.paged import in_pages

F8 = torch.float8_e4m3fn
ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 90
"""Compute capability that tiles are chosen for."""
Chunks = Sequence[tuple[int, int]]
"""Context length and query tokens of each sequence; a context below 0: padding, of length 0."""


@dataclass(frozen=True)
class Sizes:
    """Of a model and its cache."""

    kv_heads: int = 1
    group: int = 4
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None
    latent: int | None = None
    """With kv_heads 1: columns of a latent, and head_size those of the rotated key."""


def make_call(chunks: Chunks, sizes: Sizes, device: torch.device, seed: int = 0) -> AttentionCall:
    """Random queries, keys and values in permuted blocks. Two tokens more than the sequences have are there."""
    generator = torch.Generator().manual_seed(seed)
    heads, width, kv_dtype = sizes.kv_heads * sizes.group, sizes.head_size, sizes.kv_dtype or sizes.dtype
    lens = [max(0, context + count) if context >= 0 else 0 for context, count in chunks]
    needed = [-(-length // sizes.block_size) for length in lens]
    free = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    cache = torch.full((len(free), 2, sizes.kv_heads, sizes.block_size, width), float("nan"))
    tables = torch.full((len(chunks), max(needed) + 2), free.pop(), dtype=torch.int32)
    for s, ((context, _), length) in enumerate(zip(chunks, lens, strict=True)):
        tables[s, : needed[s]] = torch.tensor([free.pop() for _ in range(needed[s])], dtype=torch.int32)
        first = 0 if sizes.window is None else max(0, context - sizes.window + 1)
        positions = torch.arange(first if sizes.chunk is None else context // sizes.chunk * sizes.chunk, length)
        kv = torch.randn(len(positions), 2, sizes.kv_heads, width, generator=generator)
        cache[tables[s, positions // sizes.block_size].long(), :, :, positions % sizes.block_size] = kv
    starts = torch.tensor([0, *(count for _, count in chunks)]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1]) + 2
    qkv = torch.full((tokens, (heads + 2 * sizes.kv_heads) * width), float("nan"))
    qkv[:-2, : heads * width] = torch.randn(tokens - 2, heads * width, generator=generator) * 3
    scales = [None, None] if kv_dtype != F8 else list(torch.rand(2, sizes.kv_heads, generator=generator) + 0.5)
    sinks = torch.randn(heads, generator=generator) * 3 if sizes.sinks else None
    return AttentionCall(
        q=qkv.to(device, sizes.dtype)[:, : heads * width].view(tokens, heads, width),
        kv_layer=in_pages(cache.to(kv_dtype).to(device)),
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device)[:, :-1],
        out=torch.full((tokens, heads * width), float("nan"), dtype=sizes.dtype, device=device),
        scale=width**-0.5,
        max_query_len=max(1, *(count for _, count in chunks)),
        max_seq_len=max(lens),
        window=sizes.window,
        softcap=sizes.softcap,
        k_scale=None if scales[0] is None else scales[0].to(device),
        v_scale=None if scales[1] is None else scales[1].to(device),
        sinks=None if sinks is None else sinks.to(device),
        chunk=sizes.chunk,
    )


def make_latent_call(chunks: Chunks, sizes: Sizes, device: torch.device) -> AttentionCall:
    """Rows of latents and rotated keys; of queries NaN in columns that nothing reads."""
    assert sizes.latent is not None
    first, width = padded_latent(sizes.latent), latent_columns(sizes.latent, sizes.head_size)
    call = make_call(chunks, replace(sizes, kv_heads=1, head_size=width), device)
    cache = call.kv_layer[:, :1].clone().view(torch.uint8 if sizes.kv_dtype == F8 else call.kv_layer.dtype)
    for columns in (slice(sizes.latent, first), slice(first + sizes.head_size, width)):
        cache[..., columns] = 0
    q = call.q.clone()
    q[..., sizes.latent : first] = float("nan")
    q[..., first + sizes.head_size :] = 0
    return replace(
        call,
        q=q,
        kv_layer=in_pages(cache.view(call.kv_layer.dtype)),
        out=call.out.new_full((len(q), sizes.group * sizes.latent), float("nan")),
        scale=sizes.head_size**-0.5 / 4,
        v_scale=call.k_scale,
        latent=sizes.latent,
    )


def check(call: AttentionCall) -> None:
    """Compare what was written with the float64 meaning, and see that the tokens of no sequence stay as they were.

    Weights and results are rounded once each: in units of the weighted absolute values, twice the dtype's epsilon.
    """
    expected, size = _meaning(call)
    found = call.out.cpu().double().view(-1, *expected.shape[1:])
    bound = 2 * torch.finfo(call.q.dtype).eps * size + 2e-5 * size + 1e-6
    tokens = len(expected)
    assert found[tokens:].isnan().all()
    assert ((found[:tokens] - expected).abs() <= bound).all()


def _meaning(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The float64 meaning of attention, and that of the same weights with the values' absolute values."""
    cache = call.kv_layer.cpu().double()
    if call.k_scale is not None and call.v_scale is not None:
        cache = cache * torch.stack([call.k_scale, call.v_scale]).cpu().double()[None, :, :, None, None]
    starts, lens = call.query_start_loc.cpu().clone(), call.seq_lens.cpu()
    q = call.q[: int(starts[-1])].cpu().clone()
    if call.latent is not None:
        q[..., call.latent : padded_latent(call.latent)] = 0
    padding = torch.repeat_interleave(lens == 0, starts.diff())
    sizes = (starts.diff() * (lens > 0)).cumsum(0)
    there = starts.new_zeros(len(starts))
    there[1:] = sizes
    results = []
    for values in (cache, torch.cat([cache[:, :1], cache[:, 1:].abs()], 1)):
        result = torch.zeros(q.shape, dtype=torch.float64)
        result[~padding] = reference.attention(
            q[~padding], values, there, lens, call.block_tables.cpu(), call.scale, call.window, call.softcap,
            None if call.sinks is None else call.sinks.cpu(), call.chunk,
        )  # fmt: skip
        results.append(result[..., : call.head_size])
    return results[0], results[1]
