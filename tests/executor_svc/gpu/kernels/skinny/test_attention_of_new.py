"""Attention that writes the step's keys itself, against rotation, write and attention apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionShape, HeadNorms, Rope
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.segments import SEGMENTS, Segments
from executor_svc.gpu.kernels.rope import rope_write_kv
from executor_svc.gpu.kernels.skinny.attention import NewKeys, attention_of_new, may_attend_new
from tests.executor_svc.gpu.kernels.attention.cases import ARCH, Chunks, Sizes, check, make_call
from tests.executor_svc.gpu.kernels.attention.test_split import SMS, scratch_for
from tests.executor_svc.paged import in_pages

LONGEST = 700


def slots_of(call: AttentionCall) -> Tensor:
    """Where each token's key is written; -1 for tokens of no sequence and of padding."""
    found, starts, size = [], call.query_start_loc.tolist(), call.block_size
    for sequence, length in enumerate(call.seq_lens.tolist()):
        count = starts[sequence + 1] - starts[sequence]
        for position in range(length - count, length):
            block = int(call.block_tables[sequence, max(0, position) // size])
            found.append(block * size + position % size if length else -1)
    return torch.tensor(found + [-1] * (len(call.q) - len(found)), dtype=torch.int64, device=call.q.device)


def random_rope(call: AttentionCall, rotated: int, dtype: torch.dtype, generator: torch.Generator) -> Rope:
    angles = torch.rand(LONGEST, rotated // 2, generator=generator) * 6
    sin = torch.cat([-angles.sin(), angles.sin()], 1)
    starts, lens = call.query_start_loc.long(), call.seq_lens.long()
    rows = [torch.arange(lens[s] - (starts[s + 1] - starts[s]), lens[s]) for s in range(len(lens))]
    rows = [*rows, torch.zeros(len(call.q) - int(starts[-1]), dtype=torch.int64)]
    tables = (each.to(dtype).to(call.q.device) for each in (torch.cat([angles.cos()] * 2, 1), sin))
    return Rope(*tables, torch.cat(rows).to(call.q.device))


def compare(
    chunks: Chunks,
    sizes: Sizes,
    device: torch.device,
    *,
    rotated: int | None = None,
    rope_dtype: torch.dtype | None = None,
    normed: bool = False,
    segments: Segments | None = None,
) -> AttentionCall:
    """NaN stands where keys and values of the step come to stand; the bits written are those of the other kernel."""
    generator = torch.Generator().manual_seed(len(chunks))
    call = make_call(chunks, sizes, device)
    heads, width = sizes.kv_heads * sizes.group, sizes.head_size
    columns = (heads + 2 * sizes.kv_heads) * width
    qkv = torch.randn(len(call.q), columns, generator=generator).to(sizes.dtype).to(device)
    slots, cache = slots_of(call), call.kv_layer.clone()
    written = slots[slots >= 0]
    cache[written // sizes.block_size, :, :, written % sizes.block_size] = float("nan")
    rope = random_rope(call, width if rotated is None else rotated, rope_dtype or sizes.dtype, generator)
    norms = None
    if normed:
        weights = (torch.rand(width, generator=generator).add(0.5).to(sizes.dtype).to(device) for _ in range(2))
        norms = HeadNorms(*weights, 1e-5)
    call = replace(call, kv_layer=in_pages(cache.clone()), q=qkv.view(len(qkv), -1, width)[:, :heads])
    scratch = scratch_for(call, SMS, segments)
    attention_of_new(call, NewKeys(qkv, rope, slots, norms), ARCH, scratch, SMS, segments)
    apart, apart_cache = qkv.clone(), in_pages(cache)
    rope_write_kv(apart, rope.cos, rope.sin, rope.rows, apart_cache, slots, heads, norms)
    found, expected = (each[written // sizes.block_size, :, :, written % sizes.block_size].double()
                       for each in (call.kv_layer, apart_cache))  # fmt: skip
    assert torch.equal(found[:, 1], expected[:, 1])
    # Sums of squares have another order, and one product of a rotation in fp32 may be fused with the sum.
    unit = 0.0 if not normed and rope.cos.dtype == sizes.dtype else 2**-7 if sizes.dtype == torch.bfloat16 else 2**-10
    assert ((found - expected).abs() <= unit * expected.abs() + (unit > 0) * 1e-5).all()
    check(replace(call, q=apart.view(len(qkv), -1, width)[:, :heads]))
    assert not scratch.counters.any()
    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_decodes(group: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of sequences of several segments, of one, of one token, and of padding."""
    compare([(599, 1), (63, 1), (0, 1), (-1, 1)], Sizes(2, group, 64, dtype=dtype), device)


@pytest.mark.parametrize("context", [126, 127, 128, 255, 256])
def test_new_keys_at_edges_of_segments(context: int, device: torch.device) -> None:
    compare([(context, 1)], Sizes(), device, segments=replace(SEGMENTS, most=4))
    compare([(context, 3)], Sizes(), device, segments=replace(SEGMENTS, most=4))


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_head_sizes_and_norms(head_size: int, device: torch.device) -> None:
    compare([(300, 1), (17, 1)], Sizes(1, 2, head_size, 64), device, normed=True)


@pytest.mark.parametrize("rope_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rotated", [0, 32, 64])
def test_rotations(rotated: int, rope_dtype: torch.dtype, device: torch.device) -> None:
    compare([(140, 1), (5, 1)], Sizes(), device, rotated=rotated, rope_dtype=rope_dtype)


@pytest.mark.parametrize(("window", "chunk"), [(1, None), (100, None), (None, 130)])
def test_windows_and_chunks(window: int | None, chunk: int | None, device: torch.device) -> None:
    compare([(400, 1), (130, 1), (129, 2)], Sizes(window=window, chunk=chunk), device)


def test_drafts(device: torch.device) -> None:
    """Of one sequence, whose tokens lie in two blocks; of none; beside a first token without a context."""
    compare([(254, 5), (3, 1), (0, 2), (-1, 1)], Sizes(2, 4), device, normed=True)


def test_what_fits() -> None:
    shape = AttentionShape(32, 8, 128, 128, 1.0)
    assert may_attend_new(shape, 16, 1, 132)
    assert may_attend_new(shape, 2, 8, 132)
    assert not may_attend_new(shape, 1, 9, 132)  # tokens of 4 heads each: 36 rows
    assert not may_attend_new(replace(shape, num_kv_heads=32), 16, 1, 132)


def test_what_is_refused(device: torch.device) -> None:
    call = make_call([(3, 1)], Sizes(sinks=True), device)
    rope = Rope(*(call.q.new_zeros(9, 64) for _ in range(2)), torch.zeros(len(call.q), dtype=torch.int64))
    new = NewKeys(call.q.new_zeros(len(call.q), 6 * 64), rope, slots_of(call), None)
    with pytest.raises(ValueError, match="sinks"):
        attention_of_new(call, new, ARCH, scratch_for(call), SMS)
    with pytest.raises(ValueError, match="qkv"):
        attention_of_new(replace(call, sinks=None), new, ARCH, scratch_for(call), SMS)
