"""Split decode attention against its float64 meaning and against itself in other batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.gpu.kernels.attention.attention import attention
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import COPIED_BLOCK, HEAD_SIZES, AttentionKind
from executor_svc.gpu.kernels.attention.segments import (
    FP8_SEGMENTS,
    MAX_SEGMENTS,
    SEGMENTS,
    Segments,
    SegmentScratch,
    default_segments,
)
from executor_svc.gpu.kernels.attention.split import split_attention, split_tokens, variants
from tests.executor_svc.gpu.kernels.attention.cases import ARCH, F8, Chunks, Sizes, check, make_call
from tests.helpers.marks import short_and_long

SMS = 4
"""Of a GPU so small that short sequences are enough for several segments to a program."""


def scratch_for(call: AttentionCall, num_sms: int = SMS, segments: Segments | None = None) -> SegmentScratch:
    """NaN wherever nothing was written."""
    segments = segments or default_segments(call.kind)
    most = segments.max_segments(call.num_kv_heads, num_sms)
    records = call.num_seqs * call.max_query_len * call.num_heads * most
    floats = torch.full((records * (call.head_size + 2),), float("nan"), device=call.q.device)
    return SegmentScratch(
        floats, torch.zeros(call.num_seqs * call.num_kv_heads, dtype=torch.int32, device=call.q.device)
    )


def compare(
    chunks: Chunks, sizes: Sizes, device: torch.device, num_sms: int = SMS, segments: Segments | None = None
) -> AttentionCall:
    """Run it and compare all rows."""
    call = make_call(chunks, sizes, device)
    scratch = scratch_for(call, num_sms, segments)
    split_attention(call, ARCH, scratch, num_sms, segments)
    check(call)
    assert not scratch.counters.any()
    return call


@pytest.mark.parametrize("block_size", [16, COPIED_BLOCK])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_sizes(head_size: int, block_size: int, device: torch.device) -> None:
    compare([(599, 1), (256, 1), (-1, 1)], Sizes(1, 2, head_size, block_size), device)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [*((group, torch.float16) for group in (*range(1, 9), 17)), (1, torch.float32), (17, torch.float32)],
)
def test_groups_and_dtypes(group: int, dtype: torch.dtype, device: torch.device) -> None:
    compare([(530, 1), (3, 1)], Sizes(2, group, dtype=dtype), device)


@pytest.mark.parametrize("block_size", [16, COPIED_BLOCK])
@pytest.mark.parametrize("length", short_and_long([1, 127, 128, 129, 255, 256, 257], [1, 128, 257]))
def test_edges_of_segments(length: int, block_size: int, device: torch.device) -> None:
    compare([(length - 1, 1)], Sizes(block_size=block_size), device)


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (300, None), (511, 9.0), (None, 9.0)])
def test_window_and_softcap(window: int | None, softcap: float | None, device: torch.device) -> None:
    compare([(700, 1), (511, 1), (20, 1)], Sizes(1, 2, 64, 8, window=window, softcap=softcap), device)


@pytest.mark.parametrize("chunk", [1, 300])
def test_chunks_of_positions(chunk: int, device: torch.device) -> None:
    compare([(700, 1), (599, 1), (600, 1), (20, 1)], Sizes(1, 2, 64, 8, chunk=chunk), device)


@pytest.mark.parametrize(
    ("head_size", "block_size"),
    [*zip(HEAD_SIZES, (16, 8, 32, 32, 16, 16), strict=True), (64, COPIED_BLOCK), (96, COPIED_BLOCK)],
)
def test_fp8_cache(head_size: int, block_size: int, device: torch.device) -> None:
    sizes = Sizes(2, 2, head_size, block_size, kv_dtype=F8)
    compare([(700, 1), (20, 1)], sizes, device)
    compare([(600, 1)], replace(sizes, dtype=torch.float16, window=300, softcap=9.0), device)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, 4),
        Sizes(1, 2, window=300, softcap=9.0),
        Sizes(1, 4, window=300, kv_dtype=F8),
        Sizes(1, 4, block_size=COPIED_BLOCK),
    ],
)
def test_sinks(sizes: Sizes, device: torch.device) -> None:
    """They count once, whether a sequence has one segment or several."""
    sizes = replace(sizes, sinks=True)
    compare([(700, 1), (20, 1), (-1, 1), (0, 1)], sizes, device)
    compare([(700, 3), (20, 2)], sizes, device)


def test_long_decode(device: torch.device) -> None:
    """More keys than the segments have at least: 8,192 in 8."""
    compare([(8191, 1)], Sizes(1, 4, 64, 32), device)


@pytest.mark.parametrize("programs_per_sm", [1, 7])
@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        (Sizes(2, 4), [(419, 1), (250, 1), (63, 1), (-1, 1), (0, 1)]),
        (Sizes(2, 3, 128, COPIED_BLOCK), [(310, 1), (127, 1), (128, 1)]),
        (Sizes(1, 17, 80, kv_dtype=F8), [(300, 1), (20, 1)]),
        (Sizes(1, 4, window=100), [(299, 3), (126, 5), (255, 0), (100, 3)]),
    ],
)
def test_other_segments(sizes: Sizes, chunks: Chunks, programs_per_sm: int, device: torch.device) -> None:
    """Runs of segments, uneven among programs."""
    compare(chunks, sizes, device, segments=Segments(64, programs_per_sm, 16))


def test_padding_and_sequences_without_tokens(device: torch.device) -> None:
    compare([(400, 1), (500, 0), (-1, 1), (-1, 0), (0, 1)], Sizes(), device)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        (Sizes(2, 4), 4), (Sizes(1, 4, 128, COPIED_BLOCK), 6), (Sizes(2, 2, 128, 64, window=300), 6),
        (Sizes(1, 8, 80, dtype=torch.float16, softcap=9.0), 4), (Sizes(2, 4, 128, kv_dtype=F8), 6),
    ],
)  # fmt: skip
def test_few_tokens_of_a_sequence(sizes: Sizes, most: int, device: torch.device) -> None:
    """As with drafts: over tiles and segments whose last keys the first tokens do not see, and in one segment."""
    chunks = [(599, most), (253, 5), (511, 2), (508, most), (255, 1), (100, 3), (-1, 1)]
    compare([(context, min(count, most)) for context, count in chunks], sizes, device)


def test_how_many_tokens_fit() -> None:
    kind = AttentionKind(128, torch.bfloat16, torch.bfloat16, 16, 4)
    groups = {1: 32, 4: 8, 8: 4, 12: 2, 32: 1, 48: 1}
    assert {group: split_tokens(replace(kind, group=group)) for group in groups} == groups
    assert split_tokens(replace(kind, dtype=torch.float32, kv_dtype=torch.float32)) == 1


@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.integers(-1, 900), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.builds(
        Sizes,
        kv_heads=st.just(2),
        group=st.integers(1, 8),
        head_size=st.sampled_from(HEAD_SIZES),
        block_size=st.sampled_from([8, 16, 32, 64]),
        dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    ),
)
def test_any_decodes(device: torch.device, chunks: Chunks, num_sms: int, sizes: Sizes) -> None:
    most = split_tokens(AttentionKind(64, sizes.dtype, sizes.dtype, 16, sizes.group))
    compare([(context, min(count, most)) for context, count in chunks], sizes, device, num_sms)


def test_it_agrees_with_the_unsplit_kernel(device: torch.device) -> None:
    call = compare([(900, 1), (450, 1)], Sizes(2, 4, dtype=torch.float32), device)
    whole = replace(call, out=torch.empty_like(call.out))
    attention(whole, ARCH)
    torch.testing.assert_close(call.out[:2], whole.out[:2], rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    """Bit for bit, though other numbers of programs share the segments."""
    together = compare([(899, 1), (450, 1), (700, 1)], Sizes(), device)
    alone = replace(
        together,
        q=together.q[2:3],
        query_start_loc=together.query_start_loc[:2],
        seq_lens=together.seq_lens[2:],
        block_tables=together.block_tables[2:],
        out=torch.empty_like(together.out[2:3]),
    )
    split_attention(alone, ARCH, scratch_for(alone), SMS)
    assert torch.equal(alone.out, together.out[2:3])


def test_when_to_split() -> None:
    assert SEGMENTS.wants_split(1, 8, 1, 1024, 132)
    assert SEGMENTS.wants_split(33, 8, 1, 1024, 132)
    assert not SEGMENTS.wants_split(34, 8, 1, 1024, 132)  # two programs for each KV head would be over 4 per SM
    assert not SEGMENTS.wants_split(1, 8, 2, 1024, 132)
    assert SEGMENTS.wants_split(1, 8, 6, 1024, 132, 6)
    assert SEGMENTS.wants_split(5, 8, 6, 1024, 132, 6)
    assert not SEGMENTS.wants_split(6, 8, 6, 1024, 132, 6)  # over the scratch memory of 33 tokens
    assert not SEGMENTS.wants_split(1, 8, 1, 128, 132)
    assert not SEGMENTS.wants_split(0, 8, 1, 1024, 132)


@pytest.mark.parametrize(
    ("segments", "parts"),
    [(SEGMENTS, {1: 32, 4: 8, 16: 2, 17: 2, 33: 2, 34: 1}), (FP8_SEGMENTS, {1: 64, 4: 16, 16: 4, 33: 2, 34: 1})],
)
def test_how_many_programs_share_a_sequence(segments: Segments, parts: dict[int, int]) -> None:
    assert {num_seqs: segments.parts(num_seqs, 8, 132) for num_seqs in parts} == parts


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 8, 32, 300])
def test_scratch_is_enough_for_each_batch_that_is_split(num_kv_heads: int, device: torch.device) -> None:
    enough = SegmentScratch.of(num_kv_heads * 4, num_kv_heads, 128, 132, device)
    for segments in (SEGMENTS, FP8_SEGMENTS):
        split = [seqs for seqs in range(1, 600) if segments.wants_split(seqs, num_kv_heads, 1, 10_000, 132)]
        most = max(split, default=0)
        assert split == list(range(1, most + 1))
        max_segments = segments.max_segments(num_kv_heads, 132)
        enough.check(most * num_kv_heads * 4 * max_segments * 130, most * num_kv_heads)
        assert 1 <= max_segments <= MAX_SEGMENTS


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    call = make_call([(300, 1)], Sizes(), device)
    with pytest.raises(ValueError, match=r"^scratch\.floats must"):
        split_attention(call, ARCH, SegmentScratch(scratch_for(call).floats[:-1], scratch_for(call).counters), SMS)
    with pytest.raises(ValueError, match=r"^max_query_len must be at most 8"):
        split_attention(replace(call, max_query_len=9), ARCH, scratch_for(call), SMS)


def test_variants_name_every_argument() -> None:
    found = variants()
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert list(each.signature) == each.kernel.arg_names
        assert {name for name, type_ in each.signature.items() if type_ == "constexpr"} == set(each.constants)
