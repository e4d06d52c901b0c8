"""Attention among latents against its float64 meaning: values are a part of keys, and all heads have the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executor_svc.gpu.kernels.attention.attention import attention
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import (
    DRAFTS_ROWS,
    AttentionKind,
    Phase,
    attention_config,
    heads_of_block,
)
from executor_svc.gpu.kernels.attention.segments import LATENT_SEGMENTS, Segments, SegmentScratch
from executor_svc.gpu.kernels.attention.split import split_attention
from tests.executor_svc.gpu.kernels.attention.cases import ARCH, F8, Chunks, Sizes, check, make_latent_call

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIXED: Chunks = [(70, 1), (0, 0), (0, 33), (0, 1), (-1, 3), (40, 21), (129, 1)]
DECODES: Chunks = [(300, 1), (64, 1), (-1, 1), (0, 1)]
TINY = Sizes(group=4, latent=20, head_size=8, dtype=F32)
"""Columns of latents and keys are padded."""
WHOLE = Sizes(group=16, latent=512, head_size=64)


def split(call: AttentionCall, num_sms: int = 4) -> None:
    scratch = SegmentScratch.of_latents(call.head_size, num_sms, call.q.device)
    scratch.floats.fill_(float("nan"))
    split_attention(call, ARCH, scratch, num_sms, Segments(64, 2, 8, 2))
    assert not scratch.counters.any()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_mixed_batches(block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    for group in (1, 4, 40):
        call = make_latent_call(MIXED, replace(TINY, block_size=block_size, dtype=dtype, group=group), device)
        attention(call, ARCH)
        check(call)


@pytest.mark.parametrize(
    "sizes",
    [
        TINY, replace(TINY, group=48, dtype=BF16), replace(TINY, group=24, dtype=F16, kv_dtype=F8), WHOLE,
        replace(WHOLE, latent=256, head_size=32, group=40, kv_dtype=F8), replace(WHOLE, group=2, dtype=F32),
    ],
)  # fmt: skip
def test_decodes(sizes: Sizes, device: torch.device) -> None:
    """By one program each, and split into segments that are merged by block of heads."""
    call = make_latent_call(DECODES, sizes, device)
    attention(call, ARCH)
    check(call)
    split(call)
    check(call)


def test_prompts_of_the_usual_size(device: torch.device) -> None:
    call = make_latent_call([(20, 9), (70, 1)], WHOLE, device)
    attention(call, ARCH)
    check(call)


def test_few_tokens_of_a_sequence(device: torch.device) -> None:
    call = make_latent_call([(300, 2), (126, 2), (511, 1), (-1, 1)], replace(TINY, group=16, dtype=BF16), device)
    split(call)
    check(call)


def test_heads_of_a_block() -> None:
    assert {heads: heads_of_block(heads, BF16) for heads in (1, 16, 20, 40, 64, 96, 128)} == {
        1: 1, 16: 16, 20: 20, 40: 20, 64: 32, 96: 32, 128: 32,
    }  # fmt: skip
    assert heads_of_block(20, F32) == 10


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_tiles_fit_the_shared_memory(arch: int) -> None:
    """Keys on their way, the queries and a record, whose memory lies beside them."""
    most = {80: 163, 90: 227, 100: 227}.get(arch, 99) << 10
    for (dtype, kv_dtype), group in [((BF16, BF16), 16), ((BF16, BF16), 32), ((F32, F32), 16), ((BF16, F8), 32)]:
        if kv_dtype == F8 and arch < 90:
            continue
        for phase in Phase:
            config = attention_config(AttentionKind(512, dtype, kv_dtype, 16, group, more=64), phase, arch)
            assert config.rows >= group
            keys = kv_dtype.itemsize * config.tile * (config.num_stages - 1)
            record = 32 << 10 if dtype == BF16 else 8 << 10
            assert 576 * (dtype.itemsize * config.rows + keys) + record <= most


def test_scratch_is_enough_for_each_batch_that_is_split(device: torch.device) -> None:
    for num_heads, queries in ((16, 1), (16, 2), (20, 1), (40, 1), (128, 1)):
        group = heads_of_block(num_heads, BF16)
        blocks = num_heads // group
        scratch = SegmentScratch.of_latents(512, 132, device)
        split_seqs = [
            seqs for seqs in range(1, 600)
            if LATENT_SEGMENTS.wants_split(seqs, blocks, queries, 4096, 132, DRAFTS_ROWS // group)
        ]  # fmt: skip
        assert split_seqs
        for seqs in split_seqs:
            parts = LATENT_SEGMENTS.parts(seqs, blocks, 132)
            scratch.check(seqs * queries * num_heads * parts * 514, seqs * blocks)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    call = make_latent_call([(30, 1)], TINY, device)
    with pytest.raises(ValueError, match=r"^q must be"):
        attention(replace(call, latent=48), ARCH)
    with pytest.raises(ValueError, match=r"^latent must"):
        attention(replace(call, latent=600), ARCH)
    with pytest.raises(ValueError, match=r"^out must"):
        attention(replace(call, latent=16), ARCH)
