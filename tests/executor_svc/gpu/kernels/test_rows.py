"""Rows picked by number, bit by bit, and the likeliest token of each row of logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cadenza_common.plan.result import SlotError
from executor_svc.gpu.kernels import rows
from executor_svc.gpu.kernels.sampling import logits

NAN, INF = float("nan"), float("inf")

dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
seeds = st.integers(0, 2**31)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def apart(x: Tensor, gap: int, device: torch.device) -> Tensor:
    """A copy of x [rows, columns] with NaN in `gap` columns between its rows."""
    memory = torch.full((x.shape[0], x.shape[1] + gap), NAN, dtype=x.dtype, device=device)
    memory[:, : x.shape[1]] = x.to(device)
    return memory[:, : x.shape[1]]


@settings(max_examples=25)
@given(
    seed=seeds,
    count=st.integers(0, 12),
    width=st.sampled_from([1, 3, 16, 33, 64, 100, 576, 1023, 1024, 1025, 2050]),
    gap=st.sampled_from([0, 3, 16]),
    dtype=dtypes,
)
def test_picked_rows(seed: int, count: int, width: int, gap: int, dtype: torch.dtype, device: torch.device) -> None:
    """Bit by bit; -1 is a row of zeros, and what no id names is not read."""
    generator = torch.Generator().manual_seed(seed)
    table = randn(seed, 20, width).to(dtype)
    ids = torch.randint(-1, 19, (count,), generator=generator)
    expected = torch.where((ids >= 0)[:, None], table[ids.clamp(min=0)], torch.zeros((), dtype=dtype))
    table[19] = NAN
    out = torch.full((count + 1, width), NAN, dtype=dtype, device=device)
    rows.take_rows(apart(table, gap, device), ids.to(device), out[:count])
    assert torch.equal(out[:count].cpu(), expected)
    assert bool(out[count:].isnan().all()), "rows that are not there are not written"


@settings(max_examples=25)
@given(
    seed=seeds,
    count=st.integers(0, 12),
    width=st.sampled_from([1, 3, 16, 33, 64, 576, 1023, 1025]),
    gaps=st.tuples(st.sampled_from([0, 3, 16]), st.sampled_from([0, 3, 16])),
    dtype=dtypes,
)
def test_copied_columns(
    seed: int, count: int, width: int, gaps: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    source = randn(seed, count, width).to(dtype)
    memory = torch.full((count + 1, gaps[1] + width + 5), 7, dtype=dtype, device=device)
    expected = memory.cpu()
    expected[:count, gaps[1] : gaps[1] + width] = source
    rows.copy_columns(apart(source, gaps[0], device), memory[:count, gaps[1] : gaps[1] + width])
    assert torch.equal(memory.cpu(), expected)


@settings(max_examples=15)
@given(seed=seeds, width=st.sampled_from([5, 64, 576, 1030]), dtype=dtypes, scale=st.sampled_from([1.0, 6.3, 0.25]))
def test_embeddings(seed: int, width: int, dtype: torch.dtype, scale: float, device: torch.device) -> None:
    """Scaled in fp32 and rounded once."""
    table, ids = randn(seed, 30, width).to(dtype), torch.tensor([29, 0, -1, 7, 7])
    found = torch.empty(5, width, dtype=dtype, device=device)
    rows.embed(table.to(device), ids.to(device), scale, found)
    expected = table[ids] * scale
    expected[2] = 0
    assert torch.equal(found.cpu(), expected)


def argmax(x: Tensor) -> list[int]:
    scratch = torch.full((logits.argmax_scratch(*x.shape),), -1, dtype=torch.int32, device=x.device)
    out = torch.full((x.shape[0],), -7, dtype=torch.int64, device=x.device)
    logits.argmax(x, scratch, out)
    return out.tolist()


@settings(max_examples=25)
@given(
    seed=seeds,
    count=st.integers(1, 4),
    vocab=st.sampled_from([1, 2, 31, 1023, 1024, 1025, 2048, 5000, 32000, 65536, 65537, 70001]),
    gap=st.sampled_from([0, 1, 16]),
)
def test_argmax(seed: int, count: int, vocab: int, gap: int, device: torch.device) -> None:
    """Of few different values, so that the lowest id among equals matters, and often one chunk from another."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-40, 3, (count, vocab), generator=generator).float()
    assert argmax(apart(x, gap, device)) == x.argmax(1).tolist()


@pytest.mark.parametrize("count", [1, 128, 129])
def test_taking_the_best(count: int, device: torch.device) -> None:
    """Rows read logits in any order; padding is left alone, and what can not be sampled is an error."""
    best = torch.tensor([70000, 3, -1], device=device)
    sources = torch.arange(count, dtype=torch.int32, device=device) % 3
    slots = torch.arange(count, dtype=torch.int32, device=device).flip(0)
    slots[count // 2 :: 5] = -1
    tokens = torch.full((count,), -7, dtype=torch.int64, device=device)
    errors = torch.full((count,), -7, dtype=torch.int32, device=device)
    logits.take_best(best, slots, sources, tokens, errors)
    there = slots >= 0
    assert tokens.tolist() == torch.where(there, best[sources.long()], -7).tolist()
    failed = torch.where(best[sources.long()] < 0, int(SlotError.NON_FINITE_LOGITS), 0)
    assert errors.tolist() == torch.where(there, failed, -7).tolist()


@pytest.mark.parametrize("vocab", [1, 5, 3000])
def test_argmax_of_what_is_not_finite(vocab: int, device: torch.device) -> None:
    """Such a row gives -1, and its neighbours do not notice."""
    x = randn(0, 6, vocab)
    x[1, vocab // 2] = NAN
    x[2, vocab - 1] = INF
    x[3] = -INF
    x[4] = -INF
    x[4, vocab - 1] = -3e38
    expected = [int(x[0].argmax()), -1, -1, -1, vocab - 1, int(x[5].argmax())]
    assert argmax(x.to(device)) == expected


@pytest.mark.parametrize(("plus", "minus"), [(2000, 100), (100, 2000)])
def test_argmax_takes_zeros_for_equal(plus: int, minus: int, device: torch.device) -> None:
    x = torch.full((1, 3000), -1.0, device=device)
    x[0, plus], x[0, minus] = 0.0, -0.0
    assert argmax(x) == [100]


def test_no_rows(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    rows.take_rows(torch.zeros(4, 8, device=device), none, torch.empty(0, 8, device=device))
    assert argmax(torch.empty(0, 100, device=device)) == []


TABLE = torch.zeros(4, 32)
IDS = torch.zeros(2, dtype=torch.int64)
OUT = torch.zeros(2, 32)
SCRATCH = torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rows.take_rows(TABLE, IDS.int(), OUT), "token_ids|ids must be"),
        (lambda: rows.take_rows(TABLE, IDS, OUT.half()), "out must be"),
        (lambda: rows.take_rows(TABLE, IDS, OUT[:1]), "out must be"),
        (lambda: rows.take_rows(TABLE.double(), IDS, OUT.double()), "table must be"),
        (lambda: rows.take_rows(TABLE.t(), torch.zeros(32, dtype=torch.int64), torch.zeros(32, 4)), "table must be"),
        (lambda: rows.copy_columns(TABLE, OUT), r"target must be \[4, 32\]"),
        (lambda: rows.copy_columns(OUT, OUT.half()), "target must be a matrix of"),
        (lambda: logits.argmax(TABLE.half(), SCRATCH, IDS), "logits must be"),
        (lambda: logits.argmax(TABLE, SCRATCH, IDS), "out must be"),
        (lambda: logits.argmax(TABLE, SCRATCH[:7], torch.zeros(4, dtype=torch.int64)), "scratch must have 8"),
        (lambda: logits.argmax(TABLE, SCRATCH.float(), torch.zeros(4, dtype=torch.int64)), "scratch must be"),
    ],
)
def test_what_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
