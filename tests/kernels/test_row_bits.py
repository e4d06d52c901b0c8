"""Same row, same bits, operation by operation: what a row is computed with, and where it lies, must not show."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.kernels.cpu import CpuKernels
from executor_svc.kernels.interface import AttentionShape
from tests.kernels.driver import flat_batch

dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Compare as integers, so that 0 is not -0."""
    as_ints = torch.int32 if left.dtype == torch.float32 else torch.int16
    return left.shape == right.shape and torch.equal(left.view(as_ints), right.contiguous().view(as_ints))


def _norm_heads(x: Tensor) -> Tensor:
    """See x [T, columns] as one query, one key and one value head."""
    size = x.shape[1] // 3
    weight = torch.linspace(0.5, 2.0, size)
    return CpuKernels().norm_heads(x.clone(), weight.to(x.dtype), weight, 1e-6, AttentionShape(1, 1, size, size, 1.0))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: CpuKernels().rms_norm(x, torch.linspace(0.5, 2.0, x.shape[1], dtype=x.dtype), 1e-6),
    "rms_norm, wide weight": lambda x: CpuKernels().rms_norm(x, torch.linspace(0.5, 2.0, x.shape[1]), 1e-6),
    "norm_heads": _norm_heads,
    "silu_mul": CpuKernels().silu_mul,
    "gelu_tanh_mul": CpuKernels().gelu_tanh_mul,
    "softcap": lambda x: CpuKernels().softcap(x.clone(), 2.5),
}


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    total=st.integers(2, 150),
    width=st.sampled_from([8, 16, 20, 64, 80, 128, 171]),
    dtype=dtypes,
    data=st.data(),
)
def test_rows_among_others(
    name: str, seed: int, total: int, width: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    operation = OPERATIONS[name]
    x = (torch.randn(total, width * 6, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    start = data.draw(st.integers(0, total - 2))
    end = data.draw(st.integers(start + 2, total))
    assert equal_bits(operation(x[start:end].contiguous()), operation(x)[start:end])


@dataclass
class Text:
    """Queries [L, H, DP], keys and values [L, 2, KVH, DP] of a sequence by position."""

    q: Tensor
    kv: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[0]


def random_text(shape: AttentionShape, length: int, dtype: torch.dtype, seed: int) -> Text:
    generator = torch.Generator().manual_seed(seed)
    q = torch.zeros(length, shape.num_heads, shape.padded_head_size, dtype=dtype)
    kv = torch.zeros(length, 2, shape.num_kv_heads, shape.padded_head_size, dtype=dtype)
    for tensor in (q, kv):
        size = (*tensor.shape[:-1], shape.head_size)
        tensor[..., : shape.head_size] = torch.randn(size, generator=generator).to(dtype) * 2
    return Text(q, kv)


def attend(
    kernels: CpuKernels, shape: AttentionShape, block_size: int, work: list[tuple[Text, int, int]], rng: random.Random
) -> list[Tensor]:
    """Return [end - start, H * DP] of the tokens start to end of each text, all in one batch.

    Blocks lie anywhere. The cache is NaN but for the positions that these tokens see: those before the window are
    as if their blocks had been given to others.
    """
    tokens = sum(end - start for _, start, end in work)
    needed = [-(-end // block_size) for _, _, end in work]
    order = rng.sample(range(sum(needed) + 3), sum(needed) + 3)
    tables = [[order.pop() for _ in range(n)] for n in needed]
    size = (sum(needed) + 3, 2, shape.num_kv_heads, block_size, shape.padded_head_size)
    cache = torch.full(size, float("nan"), dtype=work[0][0].q.dtype)
    for (text, start, end), table in zip(work, tables, strict=True):
        positions = torch.arange(0 if shape.window is None else max(0, start - shape.window + 1), end)
        blocks = torch.tensor(table)[positions // block_size]
        cache[blocks, :, :, positions % block_size] = text.kv[positions]
    b = flat_batch([(start, end - start) for _, start, end in work], tables, block_size, [0] * tokens)
    q = torch.cat([text.q[start:end] for text, start, end in work])
    q = torch.cat([q, q[:1]]) if tokens == 1 else q
    plan = kernels.plan_attention(shape, block_size, b.slot_mapping, b.query_start_loc, b.seq_lens, b.block_tables)
    out = kernels.attention(q, cache, shape, plan)[:tokens]
    return list(out.split([end - start for _, start, end in work]))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_size=st.sampled_from([8, 16, 20, 64, 80, 128]),
    window=st.sampled_from([None, 1, 2, 7, 64, 65, 1000]),
    softcap=st.sampled_from([None, 3.0]),
    longest=st.integers(1, 250),
    query_tiles=st.sampled_from([(1, 16, 64), (16,)]),
    dtype=dtypes,
)
def test_attention_of_any_chunks(
    seed: int,
    kv_heads: int,
    group: int,
    head_size: int,
    window: int | None,
    softcap: float | None,
    longest: int,
    query_tiles: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Chunks of several texts, mixed with decodes, give the rows of each text computed alone in one chunk."""
    rng = random.Random(seed)
    kernels = CpuKernels(query_tiles)
    padded = kernels.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, head_size**-0.5, window, softcap)
    texts = [random_text(shape, rng.randint(1, longest), dtype, seed + i) for i in range(4)]
    expected = [attend(kernels, shape, 16, [(text, 0, text.length)], rng)[0] for text in texts]
    for _ in range(3):
        work, wanted = [], []
        for text, rows in rng.sample(list(zip(texts, expected, strict=True)), rng.randint(1, 4)):
            start = rng.randrange(text.length)
            end = rng.choice([start + 1, rng.randint(start + 1, text.length), text.length])
            work.append((text, start, end))
            wanted.append(rows[start:end])
        found = attend(kernels, shape, rng.choice([8, 16, 32, 64]), work, rng)
        assert all(bool(rows.isfinite().all()) for rows in found), "something that no token sees was read"
        assert all(map(equal_bits, found, wanted)), [(start, end, text.length) for text, start, end in work]


def test_the_comparison_sees_the_edge_of_the_window() -> None:
    """Change the value at the first position that a token sees, and the one before: only the first may show."""
    rng, kernels = random.Random(0), CpuKernels()
    shape = AttentionShape(2, 2, 16, 16, 0.25, window=70)
    text = random_text(shape, 200, torch.float32, 0)
    (before,) = attend(kernels, shape, 16, [(text, 150, 200)], rng)
    text.kv[150 - 70] += 1
    (same,) = attend(kernels, shape, 16, [(text, 150, 200)], rng)
    text.kv[150 - 69] += 1
    (after,) = attend(kernels, shape, 16, [(text, 150, 200)], rng)
    assert equal_bits(before, same)
    assert not equal_bits(before[:1], after[:1])
    assert equal_bits(before[1:], after[1:])
