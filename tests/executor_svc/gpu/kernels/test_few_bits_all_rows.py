"""Linears with weights in few bits whose programs have all rows: their numbers, sums, and parts of columns."""

from __future__ import annotations

from itertools import product as product_of

import pytest
import torch
from torch import Tensor

from executor_svc.device.dequantize import dequantize
from executor_svc.gpu.kernels.few_bits.all_rows import (
    MOST_ROWS,
    TILE_ROWS,
    all_rows_counters,
    all_rows_sums_size,
    all_rows_tile,
    linear_all_rows,
    share_of,
)
from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
from tests.executor_svc.cpu.kernels.quantized.formats import FORMATS, Q4_0, random_block
from tests.executor_svc.gpu.kernels.test_few_bits_linear import BFLOAT16, ODD, SMS, UNIT, made, packed
from tests.helpers.marks import short_and_long


def product(x: Tensor, weight: FewBitsWeight, bias: Tensor, out_dtype: torch.dtype, sms: int = SMS) -> Tensor:
    """Return x @ weight.T + bias, written to columns in the middle of a wider tensor."""
    workspace = torch.full((all_rows_sums_size(weight, sms),), float("nan"), device=x.device)
    counters = torch.zeros(all_rows_counters(weight), dtype=torch.int32, device=x.device)
    whole = torch.full((len(x) + 1, weight.rows + 9), 7.0, dtype=out_dtype, device=x.device)
    linear_all_rows(x, weight, bias, whole[:-1, 8:-1], workspace, counters, sms)
    assert not counters.any()
    assert (whole[-1] == 7).all()
    assert (whole[:, :8] == 7).all()
    assert (whole[:, -1] == 7).all()
    return whole[:-1, 8:-1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "columns"),
    short_and_long(
        [*product_of(FORMATS, (256,)), *((name, 288) for name in ("Q4_0", "Q5_1", "Q8_0")), (ODD.name, 384)],
        [*product_of(FORMATS, (256,)), ("Q5_1", 288), (ODD.name, 384)],
    ),
)
def test_every_number_is_that_of_dequantize(name: str, columns: int, device: torch.device) -> None:
    """A product with ones and zeros, columns of which fill no step in some."""
    kind, block, weight = made(name, 70, columns, device)
    eye = torch.eye(columns, dtype=BFLOAT16, device=device)
    none = torch.zeros(70, device=device)
    found = torch.cat([product(rows, weight, none, torch.float32) for rows in eye.split(MOST_ROWS)])
    assert torch.equal(found.t(), dequantize(block, kind).to(BFLOAT16).float().to(device))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    short_and_long(
        [
            (name, rows, dtype)
            for name in ("Q4_K", "Q6_K", "Q5_0", "gptq 4", "fp8 blocks")
            for rows, dtype in ((19, torch.float16), (70, BFLOAT16), (200, BFLOAT16))
        ],
        [("Q4_K", 19, torch.float16), ("Q6_K", 70, BFLOAT16), ("gptq 4", 200, BFLOAT16), ("fp8 blocks", 70, BFLOAT16)],
    ),
)
def test_products(name: str, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """In parts of programs that follow each other, and whole, with rows of the weight that fill no tile."""
    columns = 1280
    kind, block, weight = made(name, 200, columns, device)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator).to(dtype).to(device)
    bias = torch.randn(200, generator=generator).to(device)
    numbers = dequantize(block, kind).double().to(device)
    exact = x.double() @ numbers.t() + bias.double()
    magnitudes = x.double().abs() @ numbers.abs().t() + bias.double().abs()
    # Each number is rounded to dtype, each sum to float32.
    bound = (UNIT[dtype] + (columns + 8) * 2**-24) * magnitudes
    shares = [share_of(all_rows_tile(rows, kind), 200, weight.layout.steps, sms) for sms in (SMS, 1)]
    # Two tiles of 10 steps: one program ends the first and begins the second.
    assert (shares[0].programs, shares[0].steps) == (5, 4)
    for sms in (SMS, 1):
        found = product(x, weight, bias, torch.float32, sms)
        assert ((found.double() - exact).abs() <= bound).all(), sms
    assert torch.equal(product(x, weight, bias, dtype, 1), found.to(dtype))


def test_all_steps_are_shared_evenly() -> None:
    for rows, steps, sms in product_of(TILE_ROWS, range(1, 120), (1, 20, SMS)):
        tile = all_rows_tile(rows, Q4_0)
        share, units = share_of(tile, 1000, steps, sms), 8 * steps
        assert (share.programs - 1) * share.steps < units <= share.programs * share.steps
        assert share.programs <= tile.programs_per_sm * sms
    # Of a layer of 8 billion parameters, by 132 programs at once: 1,536, 1,024, 7,168 and 3,584 steps.
    largest, shapes = all_rows_tile(MOST_ROWS, Q4_0), ((6144, 32), (4096, 32), (28672, 32), (4096, 112))
    assert [share_of(largest, *shape, SMS).steps for shape in shapes] == [12, 8, 55, 28]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(MOST_ROWS + 1, 2048, dtype=BFLOAT16)}, "x: has 257 rows, more than 256"),
        ({"x": torch.zeros(2, 2048)}, r"x: must be \[M, 2048\] bfloat16 or float16"),
        ({"workspace": torch.zeros(7)}, "workspace: must be 32768 float32"),
        ({"counters": torch.zeros(1)}, "counters: must be 1 int32"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Tensor], message: str) -> None:
    weight = packed(Q4_0, random_block(Q4_0, 8, 2048, seed=1), torch.device("cpu"))
    x = change.get("x", torch.zeros(2, 2048, dtype=BFLOAT16))
    workspace = change.get("workspace", torch.zeros(all_rows_sums_size(weight, SMS)))
    counters = change.get("counters", torch.zeros(1, dtype=torch.int32))
    out = torch.zeros(len(x), 8)
    with pytest.raises(ValueError, match=message):
        linear_all_rows(x, weight, torch.zeros(8), out, workspace, counters, SMS)
