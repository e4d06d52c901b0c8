"""Latent attention of the CPU against its float64 meaning, over caches full of NaN wherever nothing need be written."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.cpu.kernels.latent.kernels import CpuHeadLinear, CpuLatentKernels
from executor_svc.device import reference
from executor_svc.device.kernels import AttentionShape, Rope
from executor_svc.device.kv_layout import KVLayout, LayerKV
from executor_svc.device.latent import latent_shape, padded_latent
from tests.executor_svc.cpu.kernels.layout import plan_for
from tests.executor_svc.cpu.kernels.processors import ISAS
from tests.executor_svc.driver import flat_batch

Chunks = list[tuple[int, int]]
F32, BF16 = torch.float32, torch.bfloat16
KERNELS, THREADS = CpuLatentKernels(), CpuLatentKernels(2)
LONGEST = 200
EPS = 1e-6


@dataclass
class Case:
    """Weights of a layer, and all tokens of sequences."""

    heads: int
    latent: int
    rope: int
    nope: int
    value: int
    block_size: int
    dtype: torch.dtype
    seed: int = 0
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        self.absorb = self.random(self.heads, self.latent, self.nope) / self.nope**0.5
        self.expand = self.random(self.heads, self.value, self.latent) / self.latent**0.5
        self.norm = self.random(self.latent) + 1
        angles = torch.randn(LONGEST, self.rope // 2, generator=self._generator).float() * 3
        both = torch.cat([angles, angles], -1)
        sin = both.sin()
        sin[:, : self.rope // 2] *= -1
        self.angles, self.cos, self.sin = angles, both.cos().to(self.dtype), sin.to(self.dtype)
        self.scales = 1 + torch.rand(LONGEST, generator=self._generator).to(self.dtype)

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator).to(self.dtype)

    @property
    def shape(self) -> AttentionShape:
        return latent_shape(self.heads, self.latent, self.rope, (self.nope + self.rope) ** -0.5)

    def cache(self, num_blocks: int) -> Tensor:
        """A layer between two others, whose bits are NaN in any dtype."""
        layers = [LayerKV(1, self.shape.padded_head_size, parts=1)] * 3
        layout = KVLayout.of(layers, self.block_size, self.kv_dtype or self.dtype)
        return layout.views(torch.full((num_blocks, layout.page_bytes), 0xFF, dtype=torch.uint8))[1]

    def ropes(self, batch: ForwardBatch) -> Rope:
        return Rope(self.cos, self.sin, batch.positions, self.scales)

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Queries, and latents with keys, as columns of wider rows."""
        width = self.heads * (self.nope + self.rope)
        both = self.random(count, width + self.latent + self.rope)
        return both[:, :width], both[:, width:]


def shuffled_tables(chunks: Chunks, block_size: int, seed: int) -> tuple[list[list[int]], int]:
    needed = [-(-(context + count) // block_size) for context, count in chunks]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    return [[order.pop() for _ in range(n)] for n in needed], sum(needed) + 2


def compare(chunks: Chunks, case: Case, kernels: CpuLatentKernels = KERNELS) -> Tensor:
    """Write all tokens of sequences, then attend those of the chunks; check both."""
    tables, num_blocks = shuffled_tables(chunks, case.block_size, case.seed)
    layer, shape, dtype = case.cache(num_blocks), case.shape, case.dtype
    whole = flat_batch([(0, sum(chunk)) for chunk in chunks], tables, case.block_size, [0] * sum(map(sum, chunks)))
    _, kv = case.tokens(len(whole.token_ids))
    angles = case.angles[whole.positions].double()
    rows = reference.latent_rows(kv, case.norm, EPS, angles)
    plan = plan_for(kernels, shape, whole, LONGEST)
    kernels.write_latents(kv.clone(), case.norm, EPS, case.ropes(whole), layer, shape, plan)
    slots = whole.slot_mapping
    written = layer[slots // case.block_size, 0, 0, slots % case.block_size]
    keys = padded_latent(case.latent)
    both = torch.cat([written[:, : case.latent], written[:, keys : keys + case.rope]], -1)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if layer.dtype == F32 else {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(both.double(), rows, **tolerance)
    assert not written[:, case.latent : keys].any()
    assert not written[:, keys + case.rope :].any()

    batch = flat_batch(chunks, tables, case.block_size, [0] * sum(count for _, count in chunks))
    q, _ = case.tokens(len(batch.token_ids))
    stored = torch.cat([layer[..., : case.latent], layer[..., keys : keys + case.rope]], -1)
    heads = q.unflatten(1, (case.heads, -1)).double()
    turned = reference.rope(heads[..., case.nope :], case.angles[batch.positions].double())
    rotated = torch.cat([heads[..., : case.nope], turned], -1) * case.scales[batch.positions].double()[:, None, None]
    where = batch.query_start_loc, batch.seq_lens, batch.block_tables, shape.scale
    expected = reference.latent_attention(rotated, case.absorb, case.expand, stored, *where)
    linears = kernels.head_linear(case.absorb), kernels.head_linear(case.expand)
    plan = plan_for(kernels, shape, batch, LONGEST)
    found = kernels.latent_attention(q, case.ropes(batch), *linears, layer, shape, plan)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == F32 else {"rtol": 3e-2, "atol": 8e-2}
    torch.testing.assert_close(found.double(), expected, **close)
    return found


@st.composite
def mixtures(draw: st.DrawFn) -> Chunks:
    """Decodes, whole prompts and chunks in the middle, one to five of them."""
    decode = st.tuples(st.integers(0, LONGEST - 1), st.just(1))
    prompt = st.tuples(st.just(0), st.integers(1, 150))
    chunk = st.tuples(st.integers(0, 130), st.integers(1, 70))
    return draw(st.lists(st.one_of(decode, prompt, chunk), min_size=1, max_size=5))


SIZES = [
    (4, 16, 8, 16, 16, 8, F32), (4, 20, 6, 12, 20, 16, BF16), (5, 48, 16, 24, 8, 32, BF16), (7, 32, 2, 7, 33, 64, F32),
    (40, 80, 24, 16, 40, 16, BF16), (1, 16, 64, 40, 64, 16, F32),
]  # fmt: skip
"""Heads, latent, rope, nope, value, block size, dtype: few, for each is compiled."""


@settings(max_examples=40)
@given(chunks=mixtures(), sizes=st.sampled_from(SIZES), seed=st.integers(0, 2**31))
def test_mixtures(chunks: Chunks, sizes: tuple[int, int, int, int, int, int, torch.dtype], seed: int) -> None:
    compare(chunks, Case(*sizes, seed=seed))


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_and_threads(isa: str) -> None:
    kernels = CpuLatentKernels(2, ISAS[isa])
    for dtype, kv_dtype in ((F32, F32), (BF16, BF16), (F32, BF16)):
        case = Case(16, 64, 16, 32, 32, 16, dtype, kv_dtype=kv_dtype)
        compare([(0, 100), (63, 2), (64, 1), (0, 1)], case, kernels)


@settings(max_examples=20)
@given(chunks=mixtures(), sizes=st.sampled_from(SIZES[:5]), seed=st.integers(0, 2**31))
def test_a_row_has_the_bits_that_it_has_alone(
    chunks: Chunks, sizes: tuple[int, int, int, int, int, int, torch.dtype], seed: int
) -> None:
    """In other batches and tiles, in blocks of other sizes, with two threads; after what others left in the memory."""
    *shape, block_size, dtype = sizes
    case = Case(*shape, block_size, dtype, seed=seed)
    linears = [kernels.head_linear(each) for kernels in (KERNELS, THREADS) for each in (case.absorb, case.expand)]
    contents = [case.tokens(context + count) for context, count in chunks]
    tables, num_blocks = shuffled_tables(chunks, block_size, seed)
    together = attended(case, KERNELS, linears[:2], chunks, contents, tables, case.cache(num_blocks))
    other = replace_block_size(case, 64 if block_size < 64 else 8)
    first = 0
    for (context, count), content in zip(chunks, contents, strict=True):
        split = count // 2
        ends = [each for each in (context + split, context + count) if each > context]
        table, blocks = shuffled_tables([(0, context + count)], other.block_size, seed)
        layer, start = other.cache(blocks), context
        for end in ends:
            given = content[0][:end], content[1][:end]
            rows = attended(other, THREADS, linears[2:], [(start, end - start)], [given], table, layer)
            assert torch.equal(rows, together[first : first + end - start])
            first, start = first + end - start, end


def replace_block_size(case: Case, block_size: int) -> Case:
    other = copy(case)
    other.block_size = block_size
    return other


def attended(
    case: Case,
    kernels: CpuLatentKernels,
    linears: list[CpuHeadLinear],
    chunks: Chunks,
    contents: list[tuple[Tensor, Tensor]],
    tables: list[list[int]],
    layer: Tensor,
) -> Tensor:
    """Write all tokens of sequences up to the chunks' ends, and attend those of the chunks."""
    whole = flat_batch([(0, sum(chunk)) for chunk in chunks], tables, case.block_size, [0] * sum(map(sum, chunks)))
    kv = torch.cat([each for _, each in contents])
    plan = plan_for(kernels, case.shape, whole, LONGEST)
    kernels.write_latents(kv, case.norm, EPS, case.ropes(whole), layer, case.shape, plan)
    batch = flat_batch(chunks, tables, case.block_size, [0] * sum(count for _, count in chunks))
    q = torch.cat([each[context:] for (context, _), (each, _) in zip(chunks, contents, strict=True)])
    plan = plan_for(kernels, case.shape, batch, LONGEST)
    return kernels.latent_attention(q, case.ropes(batch), *linears, layer, case.shape, plan)
