"""Linears and embeddings with weights in few bits on a GPU: their numbers, sums, and the same bits in every batch."""

from __future__ import annotations

from itertools import product as product_of

import pytest
import torch
from torch import Tensor

from executor_svc.device.dequantize import dequantize
from executor_svc.device.stored_linear import QuantBlock, QuantFormat
from executor_svc.gpu.kernels.few_bits.embedding import embed_few_bits
from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight, is_supported, stored_as
from executor_svc.gpu.kernels.few_bits.linear import (
    MOST_ROWS,
    TILE_ROWS,
    launch,
    linear_few_bits,
    num_parts,
    tile_of,
    workspace_size,
)
from executor_svc.gpu.kernels.few_bits.widening import widen
from tests.executor_svc.cpu.kernels.quantized.formats import (
    FORMATS,
    INT8_ROWS,
    Q4_0,
    Q4_K,
    Q6_K,
    format_of,
    random_block,
)
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import part_of
from tests.helpers.marks import short_and_long

SMS = 132
BFLOAT16 = torch.bfloat16
UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Largest relative error of rounding."""
ODD = QuantFormat("groups of 96", 8, 96, zero=128, scale="float32")


def packed(kind: QuantFormat, block: QuantBlock, device: torch.device, piece: int = 37) -> FewBitsWeight:
    """Return a weight in a GPU's planes, written in pieces that end within tiles."""
    weight = FewBitsWeight(kind, len(block), block.codes.shape[1], device)
    for first in range(0, len(block), piece):
        weight.write(first, part_of(block, first, first + piece))
    return weight


def made(name: str, rows: int, columns: int, device: torch.device) -> tuple[QuantFormat, QuantBlock, FewBitsWeight]:
    kind = ODD if name == ODD.name else format_of(name, columns)
    block = random_block(kind, rows, columns, seed=rows + columns)
    return kind, block, packed(kind, block, device)


def product(
    x: Tensor, weight: FewBitsWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32, sms: int = SMS
) -> Tensor:
    """Return x @ weight.T + bias, written to columns in the middle of a wider tensor."""
    size = workspace_size(weight, sms)
    workspace = torch.full((size,), float("nan"), device=x.device) if size else None
    whole = torch.full((len(x) + 1, weight.rows + 9), 7.0, dtype=out_dtype, device=x.device)
    out = whole[:-1, 8:-1]
    added = torch.zeros(weight.rows, device=x.device) if bias is None else bias
    linear_few_bits(x, weight, added, out, workspace, sms)
    assert (whole[-1] == 7).all()
    assert (whole[:, :8] == 7).all()
    assert (whole[:, -1] == 7).all()
    return out


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "dtype"),
    short_and_long(
        product_of([*FORMATS, ODD.name], [BFLOAT16, torch.float16]),
        [*((name, BFLOAT16) for name in FORMATS), *((name, torch.float16) for name in ("Q4_K", "gptq 4", ODD.name))],
    ),
)
def test_every_number_is_that_of_dequantize(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of the table, and the product with a matrix of ones and zeros."""
    by_256 = [each for each in FORMATS if 256 in (format_of(each, 512).group, format_of(each, 512).super_group)]
    odd = {"gptq 4": 384, "fp8 blocks": 384, ODD.name: 384, "gptq 8": 320} | dict.fromkeys(by_256, 256)
    columns = odd.get(name, 288)
    kind, block, weight = made(name, 70, columns, device)
    expected = dequantize(block, kind).to(dtype).to(device)

    ids = torch.tensor([69, 0, -1, 63, 64], device=device)
    rows = torch.empty(len(ids), columns, dtype=dtype, device=device)
    embed_few_bits(weight, ids, 1.0, rows)
    assert torch.equal(rows, torch.where(ids[:, None] >= 0, expected[ids], 0))
    embed_few_bits(weight, ids, 0.3, rows)
    assert torch.equal(rows, (torch.where(ids[:, None] >= 0, expected[ids], 0).float() * 0.3).to(dtype))

    some = torch.empty(6, columns, dtype=dtype, device=device)
    widen(weight, 64, some)
    assert torch.equal(some, expected[64:])
    eye = torch.eye(columns, dtype=dtype, device=device)
    found = torch.cat([product(some, weight) for some in eye.split(MOST_ROWS)])
    assert torch.equal(found.t(), expected.float())
    # Few rows have them as they are, not rounded.
    exact = dequantize(block, kind).to(device) if kind.group != 16 else expected.float()
    few = torch.arange(0, columns, columns // 13, device=device)
    for rows in few.split(8):
        assert torch.equal(product(eye[rows], weight).t(), exact[:, rows])


def test_nan_of_e4m3_marks_its_group(device: torch.device) -> None:
    kind = format_of("fp8 blocks", 384)
    block = random_block(kind, 3, 384, 0)
    block.codes[0, 3], block.codes[2, 383] = 0x7F, 0xFF
    out = torch.empty(3, 384, device=device)
    embed_few_bits(packed(kind, block, device), torch.arange(3, device=device), 1.0, out)
    bad = torch.zeros(3, 384, dtype=torch.bool)
    bad[0, :128] = bad[2, 256:] = True
    assert torch.equal(out.cpu().isnan(), bad)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    short_and_long(
        [
            (name, rows, dtype)
            for name in ("Q4_K", "Q6_K", "Q5_0", "gptq 4", "fp8 blocks", INT8_ROWS)
            for rows, dtype in ((1, BFLOAT16), (19, torch.float16), (70, BFLOAT16))
        ],
        [
            *(("Q4_K", 1, BFLOAT16), ("Q5_0", 1, BFLOAT16), (INT8_ROWS, 1, BFLOAT16)),
            *(("Q6_K", 19, torch.float16), ("gptq 4", 19, torch.float16), (INT8_ROWS, 19, torch.float16)),
            *(("Q4_K", 70, BFLOAT16), ("fp8 blocks", 70, BFLOAT16)),
        ],
    ),
)
def test_products(name: str, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Several segments, the last a part, and rows of the weight that fill no tile."""
    columns = 1280
    kind, block, weight = made(name, 130, columns, device)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator).to(dtype).to(device)
    bias = torch.randn(130, generator=generator).to(device)
    numbers = dequantize(block, kind).double().to(device)
    exact = x.double() @ numbers.t() + bias.double()
    magnitudes = x.double().abs() @ numbers.abs().t() + bias.double().abs()
    # Each number is rounded to dtype, each sum to float32.
    bound = (UNIT[dtype] + (columns + 8) * 2**-24) * magnitudes
    found = product(x, weight, bias)
    assert ((found.double() - exact).abs() <= bound).all()
    rounded = product(x, weight, bias, out_dtype=dtype)
    assert torch.equal(rounded, found.to(dtype))


@pytest.mark.parametrize("name", short_and_long(["Q4_K", "Q6_K", "Q8_0", "gptq 4"], ["Q4_K", "gptq 4"]))
def test_few_rows_do_not_depend_on_those_beside_them(name: str, device: torch.device) -> None:
    """In one tile of rows, and with another number of parts but for rounding."""
    kind, _, weight = made(name, 67, 1280, device)
    # Sums of codes are exact, in any order.
    x = torch.randint(-3, 4, (8, 1280), generator=torch.Generator().manual_seed(5)).to(BFLOAT16).to(device)
    expected = product(x, weight)
    for rows in (1, 2, 7):
        assert torch.equal(product(x[8 - rows :], weight), expected[8 - rows :]), rows
    assert num_parts(tile_of(8, kind), 67, weight.layout.steps, SMS) == 2
    whole = torch.empty_like(expected)
    launch(x, weight, torch.zeros(67, device=device), whole, None, tile_of(8, kind), 1)
    assert torch.allclose(whole, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_that_of_the_format(name: str) -> None:
    for columns in (4096, 576):
        kind = format_of(name, columns)
        if columns % (kind.super_group or kind.group) == 0:
            weight = FewBitsWeight(kind, 256, columns, torch.device("cpu"))
            assert weight.num_bytes <= 1.05 * stored_as(kind).num_bytes((256, columns)), columns


def test_what_no_kernel_has() -> None:
    assert all(is_supported(format_of(name, 4096), 4096) for name in FORMATS)
    assert not is_supported(QuantFormat("groups of 8", 4, 8), 4096)
    assert not is_supported(Q6_K, 4096 + 128)
    assert not is_supported(QuantFormat("sevens", 4, 32, values="e4m3"), 4096)
    assert TILE_ROWS == (8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 32, dtype=BFLOAT16)}, r"x: must be \[M, 64\] bfloat16 or float16"),
        ({"x": torch.zeros(2, 64)}, "x: must be"),
        ({"x": torch.zeros(64, 2, dtype=BFLOAT16).t()}, "x: must be contiguous"),
        ({"bias": torch.zeros(7)}, r"bias: must be \[8\] float32"),
        ({"out": torch.zeros(2, 8, dtype=torch.float16)}, r"out: must be \[2, 8\] torch.bfloat16 or float32"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Tensor], message: str) -> None:
    weight = packed(Q4_0, random_block(Q4_0, 8, 64, seed=1), torch.device("cpu"))
    arguments = {"x": torch.zeros(2, 64, dtype=BFLOAT16), "bias": torch.zeros(8), "out": torch.zeros(2, 8)} | change
    with pytest.raises(ValueError, match=message):
        linear_few_bits(arguments["x"], weight, arguments["bias"], arguments["out"], None, SMS)


def test_no_part_is_empty() -> None:
    for tile, steps, sms in product_of([tile_of(rows, Q4_K) for rows in TILE_ROWS], range(1, 120), (1, 20, SMS)):
        parts = num_parts(tile, 1000, steps, sms)
        assert (parts - 1) * -(-steps // parts) < steps


def test_a_workspace_is_needed_where_products_are_divided(device: torch.device) -> None:
    kind, block, weight = made("Q4_K", 64, 2048, device)
    x, out = torch.zeros(1, 2048, dtype=BFLOAT16, device=device), torch.zeros(1, 64, device=device)
    with pytest.raises(ValueError, match="workspace: must be 256 float32"):
        linear_few_bits(x, weight, torch.zeros(64, device=device), out, None, SMS)
    assert kind == Q4_K
    assert len(block) == 64
