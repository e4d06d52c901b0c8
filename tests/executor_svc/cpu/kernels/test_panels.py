"""Weights in panels: every number at its place, in any pieces; and rows from panels, bit for bit those of the table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.panels import new_panels
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.processors import ISAS

F32, BF16 = torch.float32, torch.bfloat16
KERNELS = CpuKernels(2)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def panels_of(weight: Tensor, kernels: CpuKernels = KERNELS, *cuts: int) -> Tensor:
    """Return the panels of a weight, written in pieces that end at these rows."""
    panels, first = new_panels(*weight.shape, weight.dtype), 0
    for end in (*cuts, len(weight)):
        kernels.panel_writer.write(panels, first, weight[first:end])
        first = end
    return panels


def definition(weight: Tensor) -> Tensor:
    """[N, K] as [N / 32, K / step, 32, step], zeros beyond N and K."""
    step = 2 if weight.dtype == BF16 else 1
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % step, 0, -rows % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // step, step).transpose(1, 2)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (32, 2), (33, 3), (70, 9), (96, 64)])
def test_panels_hold_the_weight(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Number [n, k] of the weight lies in panel n // 32, row n % 32; what is beyond the weight is 0."""
    weight, step = randn(0, *shape).to(dtype), 2 if dtype == BF16 else 1
    panels = panels_of(weight)
    assert panels.is_contiguous()
    assert panels.shape == (-(-shape[0] // PANEL), -(-shape[1] // step), PANEL, step)
    for n in range(shape[0]):
        for k in range(shape[1]):
            assert panels[n // PANEL, k // step, n % PANEL, k % step] == weight[n, k]
    assert int((panels != 0).sum()) == int((weight != 0).sum())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 150),
    columns=st.integers(1, 90),
    cuts=st.lists(st.integers(0, 150), max_size=4),
    dtype=st.sampled_from([F32, BF16]),
)
def test_pieces_at_any_row(seed: int, rows: int, columns: int, cuts: list[int], dtype: torch.dtype) -> None:
    weight = randn(seed, rows, columns).to(dtype)
    found = panels_of(weight, KERNELS, *sorted(cut for cut in cuts if cut < rows))
    assert equal_bits(found, definition(weight).contiguous())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_as_compiled_for_lower_levels(dtype: torch.dtype, isa: str) -> None:
    weight = randn(0, 117, 83).to(dtype)
    assert equal_bits(panels_of(weight, CpuKernels(1, ISAS[isa])), definition(weight).contiguous())


def test_memory_of_large_panels_is_zero_at_first() -> None:
    """It comes from the system in large pages, not from a heap."""
    panels = new_panels(1001, 1001, BF16)
    assert panels.shape == (32, 501, 32, 2)
    assert not bool(panels.any())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(1, 100),
    width=st.one_of(st.integers(1, 40), st.sampled_from([64, 77, 576])),
    count=st.integers(1, 20),
    dtype=st.sampled_from([F32, BF16]),
    scale=st.sampled_from([1.0, 6.3]),
)
def test_rows_from_panels_have_the_bits_of_the_table(
    seed: int, vocabulary: int, width: int, count: int, dtype: torch.dtype, scale: float
) -> None:
    table = randn(seed, vocabulary, width).to(dtype)
    table[0, 0], table[-1, -1] = float("inf"), float("nan")
    ids = torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
    found = KERNELS.embed_from_panels(panels_of(table), width, ids, scale, dtype)
    assert equal_bits(found, KERNELS.embed(table, ids, scale))
