"""Exact attention against its float64 meaning, and rows against themselves in other chunks, batches and blocks.

The interpreter multiplies by numpy: where bits are compared, in the order of columns (`ordered_products`). That the
instructions of all batches are the same is read from their PTX, in `test_exact_instructions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor_svc.gpu.kernels.attention.attention import attention
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import HEAD_SIZES
from executor_svc.gpu.kernels.attention.segments import SegmentScratch
from executor_svc.gpu.kernels.attention.split import split_attention
from executor_svc.gpu.kernels.exact.attention import exact_attention, most_segments, variants
from executor_svc.gpu.kernels.exact.attention_config import SEGMENT_KEYS
from tests.executor_svc.gpu.kernels.attention.cases import ARCH, F8, Chunks, Sizes, check, make_call, make_latent_call
from tests.executor_svc.paged import in_pages
from tests.helpers.marks import short_and_long

SMS = 132


def scratch_for(call: AttentionCall) -> SegmentScratch:
    """NaN wherever nothing was written."""
    records = call.num_seqs * call.max_query_len * call.num_heads * most_segments(call.max_seq_len)
    floats = torch.full((records * (call.head_size + 2),), float("nan"), device=call.q.device)
    counters = torch.zeros(call.num_seqs * call.num_kv_heads, dtype=torch.int32, device=call.q.device)
    return SegmentScratch(floats, counters)


def run(call: AttentionCall, parts: int = 1, one_tile: bool | None = None, wide: bool = False) -> Tensor:
    scratch = scratch_for(call)
    exact_attention(call, ARCH, scratch, SMS, wide, parts, one_tile)
    assert not scratch.counters.any()
    return call.out


MIXED: Chunks = [(0, 37), (300, 1), (515, 20), (-1, 1), (0, 1)]
DECODES: Chunks = [(599, 1), (256, 1), (-1, 1), (3, 1)]


@pytest.mark.parametrize("head_size", short_and_long([*HEAD_SIZES], [64, 80, 512]))
def test_head_sizes(head_size: int, device: torch.device) -> None:
    for chunks, parts in ((MIXED, 1), (DECODES, 1), (DECODES, 3)):
        call = make_call(chunks, Sizes(1, 2, head_size), device)
        run(call, parts)
        check(call)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, 3, dtype=torch.float16),
        Sizes(1, 2, dtype=torch.float32),
        Sizes(1, 2, kv_dtype=F8, block_size=64),
        Sizes(1, 2, window=300, sinks=True),
        Sizes(1, 2, softcap=9.0, block_size=8),
        Sizes(1, 2, chunk=200),
    ],
    ids=str,
)
def test_kinds(sizes: Sizes, device: torch.device) -> None:
    for chunks, parts in ((MIXED, 1), (DECODES, 2)):
        call = make_call(chunks, sizes, device)
        run(call, parts)
        check(call)


def test_latents(device: torch.device) -> None:
    for chunks, parts in (([(0, 9), (300, 1)], 1), ([(599, 1), (-1, 1)], 3)):
        call = make_latent_call(chunks, Sizes(group=4, head_size=32, latent=72), device)
        run(call, parts)
        check(call)


class Sequences:
    """Sequences whose queries, keys and values are known, for any batch of some of their tokens."""

    def __init__(self, lengths: Sequence[int], sizes: Sizes, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        heads, width = sizes.kv_heads * sizes.group, sizes.head_size
        self.sizes, self.device = sizes, device
        self.q = [torch.randn(length, heads, width, generator=generator) * 3 for length in lengths]
        self.kv = [torch.randn(length, 2, sizes.kv_heads, width, generator=generator) for length in lengths]

    def batch(self, chunks: Sequence[tuple[int, int, int]], block_size: int = 16) -> AttentionCall:
        """chunks: sequence, context length and number of tokens. The cache holds what the batch's tokens may see."""
        sizes, empty = replace(self.sizes, block_size=block_size), [(context, count) for _, context, count in chunks]
        call = make_call(empty, sizes, self.device)
        q = call.q.clone()
        cache = call.kv_layer.float().cpu()
        starts = call.query_start_loc.tolist()
        for index, (sequence, context, count) in enumerate(chunks):
            q[starts[index] : starts[index] + count] = self.q[sequence][context : context + count].to(q)
            positions = torch.arange(context + count)
            table = call.block_tables[index].cpu()
            here = table[positions // block_size].long(), slice(None), slice(None), positions % block_size
            cache[here] = self.kv[sequence][: context + count]
        scales = [None if each is None else torch.ones_like(each) for each in (call.k_scale, call.v_scale)]
        return replace(
            call, q=q, kv_layer=in_pages(cache.to(call.kv_layer.dtype).to(self.device)),
            sinks=None if call.sinks is None else torch.ones_like(call.sinks), k_scale=scales[0], v_scale=scales[1],
        )  # fmt: skip


def rows_of(call: AttentionCall, index: int, count: int) -> Tensor:
    start = int(call.query_start_loc[index])
    return call.out[start : start + count].view(torch.int32 if call.out.dtype == torch.float32 else torch.int16)


INVARIANT = [
    Sizes(2, 4),
    Sizes(1, 2, dtype=torch.float32),
    Sizes(1, 4, kv_dtype=F8),
    Sizes(1, 4, window=270, sinks=True),
    Sizes(1, 2, softcap=9.0),
    Sizes(1, 2, chunk=100),
]


@pytest.mark.parametrize("sizes", INVARIANT, ids=str)
def test_rows_are_the_same_in_other_chunks_batches_and_blocks(
    sizes: Sizes, device: torch.device, ordered_products: None
) -> None:
    length = 2 * SEGMENT_KEYS + 29
    known = Sequences([length, 70, 301], sizes, device)
    whole = known.batch([(0, 0, length)])
    run(whole)

    def same(chunks: Sequence[tuple[int, int, int]], parts: int = 1, block_size: int = 16, **how: bool) -> None:
        call = known.batch(chunks, block_size)
        run(call, parts, **how)
        for index, (sequence, context, count) in enumerate(chunks):
            if sequence == 0:
                expected = rows_of(whole, 0, length)[context : context + count]
                assert torch.equal(rows_of(call, index, count), expected), (chunks, parts, block_size)

    last = length - 1
    same([(0, last, 1)])
    same([(0, last, 1)], parts=2, block_size=8)
    same([(1, 69, 1), (0, last, 1), (2, 300, 1)], parts=3)
    same([(0, last, 1)], one_tile=False, block_size=64)
    same([(0, last - 3, 4), (1, 69, 1)], parts=2)  # drafts
    same([(2, 0, 200), (0, 490, 51), (1, 60, 10)], block_size=32)
    same([(0, SEGMENT_KEYS - 1, 2), (0, SEGMENT_KEYS, 1)])
    same([(0, 5, 100), (1, 0, 70)], wide=True)


def test_fast_attention_depends_on_the_batch(device: torch.device, ordered_products: None) -> None:
    """Or the comparisons above find nothing."""
    length = SEGMENT_KEYS + 29
    known = Sequences([length], Sizes(1, 4), device)
    whole, alone = known.batch([(0, 0, length)]), known.batch([(0, length - 1, 1)])
    attention(whole, ARCH)
    scratch = SegmentScratch.of(4, 1, 64, SMS, device)
    split_attention(alone, ARCH, scratch, SMS)
    assert not torch.equal(rows_of(alone, 0, 1), rows_of(whole, 0, length)[-1:])


def test_windows_see_few_segments(device: torch.device, ordered_products: None) -> None:
    """So that records of long sequences are few: as many as are written."""
    length = 5 * SEGMENT_KEYS + 3
    known = Sequences([length], Sizes(1, 2, window=SEGMENT_KEYS + 2), device)
    whole, alone = known.batch([(0, 0, length)]), known.batch([(0, length - 2, 2)])
    run(whole)
    assert most_segments(length, 2, SEGMENT_KEYS + 2) == 3
    run(alone, parts=3)
    assert torch.equal(rows_of(alone, 0, 2), rows_of(whole, 0, length)[-2:])


def test_prompts_and_decodes_must_have_the_same_instructions() -> None:
    """The compiler's output is refused else, and where a row of a product is not in one warp."""
    found: dict[str, set[frozenset[str]]] = {}
    for each in variants():
        kind = each.name.split(" ", 2)[2]
        if 90 in each.archs and each.constants["HEAD_SIZE"] <= 128 and not each.constants["MORE"]:
            found.setdefault(kind, set()).add(each.products.get(90, frozenset()))
            assert each.whole_rows == (each.signature["q"] != "*fp32")
    assert len(found) > 20
    assert all(len(instructions) == 1 for instructions in found.values()), found
