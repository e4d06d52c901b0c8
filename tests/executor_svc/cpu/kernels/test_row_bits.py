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

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.device.kernels import AttentionShape, HeadNorms
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.layout import as_kept, plan_for
from tests.executor_svc.driver import flat_batch

dtypes = st.sampled_from([torch.float32, torch.bfloat16])
_LONGEST = 250
KERNELS = CpuKernels()
"""Made once: each shape is compiled once."""

TEAM = CpuKernels(3)
"""The same on three threads."""


def _norm_heads(kernels: CpuKernels, x: Tensor) -> Tensor:
    """See x [T, columns] as one query, one key and one value head."""
    size = x.shape[1] // 3
    weight = torch.linspace(0.5, 2.0, size)
    norms = HeadNorms(weight.to(x.dtype), weight.to(x.dtype), 1e-6)
    return kernels.norm_heads(x.clone(), norms, AttentionShape(1, 1, size, size, 1.0))


def _add_rms_norm(kernels: CpuKernels, x: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, x.shape[1] // 2, dtype=x.dtype)
    left, right = (half.clone(memory_format=torch.contiguous_format) for half in x.chunk(2, -1))
    return torch.cat(kernels.add_rms_norm(left, right, weight, 1e-6, 0.7), -1)


OPERATIONS: dict[str, Callable[[CpuKernels, Tensor], Tensor]] = {
    "rms_norm": lambda k, x: k.rms_norm(x, torch.linspace(0.5, 2.0, x.shape[1], dtype=x.dtype), 1e-6),
    "rms_norm, wide weight": lambda k, x: k.rms_norm(x, torch.linspace(0.5, 2.0, x.shape[1]), 1e-6),
    "add_rms_norm": _add_rms_norm,
    "add": lambda k, x: k.add(x.clone(), x.flip(1).contiguous(), 0.3),
    "norm_heads": _norm_heads,
    "silu_mul": lambda k, x: k.silu_mul(x),
    "gelu_tanh_mul": lambda k, x: k.gelu_tanh_mul(x),
    "finish_logits": lambda k, x: k.finish_logits(x.float(), x.dtype, 1.7, 2.5),
    "copy_columns": lambda k, x: k.copy_columns(x, 3, torch.zeros_like(x), 1, x.shape[1] - 4),
    "take_rows": lambda k, x: k.embed(x, torch.arange(x.shape[0]), 1.3),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    total=st.integers(1, 150),
    width=st.sampled_from([8, 16, 20, 64, 171]),
    dtype=dtypes,
    data=st.data(),
)
def test_rows_among_others(
    name: str, seed: int, total: int, width: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    operation = OPERATIONS[name]
    x = (torch.randn(total, width * 6, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    start = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(start + 1, total))
    whole = operation(KERNELS, x)
    assert equal_bits(operation(KERNELS, x[start:end].contiguous()), whole[start:end])
    assert equal_bits(operation(TEAM, x), whole)


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
    out = kernels.attention(q, as_kept(cache), shape, plan_for(kernels, shape, b, _LONGEST))
    return list(out.split([end - start for _, start, end in work]))


SHAPES = [
    (AttentionShape(1, 1, 64, 64, 0.125), 8),
    (AttentionShape(6, 2, 20, 32, 0.2, window=7), 64),
    (AttentionShape(6, 3, 16, 16, 0.25, window=65, softcap=3.0), 32),
    (AttentionShape(5, 1, 128, 128, 0.1), 64),
    (AttentionShape(13, 1, 8, 16, 0.3, softcap=3.0), 8),
    (AttentionShape(4, 4, 80, 80, 0.1, window=100), 32),
]
"""With sizes of blocks. Few, for each shape is compiled for each size."""


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    shape_and_blocks=st.sampled_from(SHAPES),
    longest=st.integers(1, _LONGEST),
    dtype=dtypes,
)
def test_attention_of_any_chunks(
    seed: int, shape_and_blocks: tuple[AttentionShape, int], longest: int, dtype: torch.dtype
) -> None:
    """Chunks of several texts, mixed with decodes, give the rows of each text computed alone in one chunk."""
    shape, block_size = shape_and_blocks
    rng = random.Random(seed)
    texts = [random_text(shape, rng.randint(1, longest), dtype, seed + i) for i in range(6)]
    expected = [attend(KERNELS, shape, 16, [(text, 0, text.length)], rng)[0] for text in texts]
    for kernels in (KERNELS, KERNELS, TEAM):
        work, wanted = [], []
        for text, rows in rng.sample(list(zip(texts, expected, strict=True)), rng.randint(1, 6)):
            start = rng.randrange(text.length)
            end = rng.choice([start + 1, start + 1, rng.randint(start + 1, text.length), text.length])
            work.append((text, start, end))
            wanted.append(rows[start:end])
        found = attend(kernels, shape, rng.choice([16, block_size]), work, rng)
        assert all(bool(rows.isfinite().all()) for rows in found), "something that no token sees was read"
        assert all(map(equal_bits, found, wanted)), [(start, end, text.length) for text, start, end in work]


def test_decodes_of_any_number() -> None:
    """Few or many, on one thread or several: each is computed as if it were alone."""
    for dtype in (torch.float32, torch.bfloat16):
        shape, rng = AttentionShape(9, 3, 64, 64, 0.125), random.Random(1)
        texts = [random_text(shape, length, dtype, length) for length in range(30, 230, 5)]
        expected = [attend(KERNELS, shape, 16, [(text, 0, text.length)], rng)[0][-1:] for text in texts]
        for kernels in (KERNELS, TEAM):
            for count in (1, 2, 3, 4, 5, 6, 7, 40):
                chosen = rng.sample(range(len(texts)), count)
                work = [(texts[i], texts[i].length - 1, texts[i].length) for i in chosen]
                found = attend(kernels, shape, 16, work, rng)
                assert all(equal_bits(rows, expected[i]) for rows, i in zip(found, chosen, strict=True)), count


def test_the_comparison_sees_the_edge_of_the_window() -> None:
    """Change the value at the first position that a token sees, and the one before: only the first may show."""
    rng, kernels = random.Random(0), KERNELS
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


def test_subnormal_numbers_are_kept_by_every_thread() -> None:
    """A thread that flushed them to 0 would give its items other bits."""
    x = torch.full((400, 40), 1e-40)
    assert equal_bits(TEAM.add(x, torch.zeros(400, 40)), x)
