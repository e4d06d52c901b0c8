"""Kernels for weights in few bits: embeddings to the bit, products against float64, of every format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.dequantize import dequantize
from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.few_bits.embedding import embed
from executor_svc.gpu.kernels.few_bits.packed import PackedWeight, is_supported, pack
from executor_svc.gpu.kernels.few_bits.product import configuration, product, workspace_size
from tests.executor_svc.cpu.kernels.quantized.formats import FORMATS, format_of, random_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows

SMS = 132
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Largest relative error of rounding."""


def packed(name: str, rows: int, columns: int, device: torch.device) -> tuple[PackedWeight, Tensor]:
    """A random weight of two parts, and its numbers in float32."""
    kind = format_of(name, columns)
    assert is_supported(kind, columns)
    blocks = [random_block(kind, count, columns, seed) for seed, count in enumerate((rows // 3, rows - rows // 3))]
    numbers = torch.cat([dequantize(block, kind) for block in blocks])
    return pack([BlockRows(kind, block) for block in blocks], device), numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_embeddings_are_the_numbers_of_the_definition(name: str, dtype: torch.dtype, device: torch.device) -> None:
    columns = 512 if "K" in name else 384
    table, numbers = packed(name, 70, columns, device)
    ids = torch.tensor([69, 0, -1, 50, 22, 23, 0], device=device)
    out = torch.full((7, columns), 7.0, dtype=dtype, device=device)
    embed(table, ids, 1.0, out)
    expected = numbers.to(dtype)[ids.cpu()]
    expected[2] = 0
    assert torch.equal(out.cpu(), expected)
    embed(table, ids, 3.5, out)
    assert torch.equal(out.cpu(), (expected.float() * 3.5).to(dtype))


def check_product(
    name: str, rows: int, out_features: int, columns: int, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]
) -> PackedWeight:
    """Multiply into some columns of a wider result."""
    weight, numbers = packed(name, out_features, columns, device)
    dtype, out_dtype = dtypes
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=draw).to(dtype).to(device)
    bias = torch.randn(out_features, generator=draw).to(device)
    size = workspace_size(weight, SMS)
    workspace = torch.full((size,), float("nan"), device=device) if size else None
    wide = torch.full((rows, out_features + 9), 7.0, dtype=out_dtype, device=device)
    out = wide[:, 4 : 4 + out_features]
    product(x, weight, torch.ones(out_features, device=device), bias, out, workspace, SMS)

    rounded = numbers.to(dtype).double()
    expected = reference.linear(x.cpu(), rounded, bias.cpu())
    magnitudes = x.cpu().double().abs() @ rounded.abs().t() + bias.cpu().double().abs()
    # Products are exact; each sum is rounded or cut to float32.
    bound = (columns + 4) * 2**-23 * magnitudes + UNIT[out_dtype] * expected.abs() + 1e-7
    assert ((out.cpu().double() - expected).abs() <= bound).all()
    assert (wide[:, :4] == 7).all()
    assert (wide[:, 4 + out_features :] == 7).all()
    return weight


BF16 = (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format(name: str, device: torch.device) -> None:
    check_product(name, 3, 70, 512 if "K" in name else 384, device, (torch.bfloat16, torch.float32))


@pytest.mark.parametrize("dtypes", [BF16, (torch.float16, torch.float16), (torch.float16, torch.float32)])
def test_dtypes(dtypes: tuple[torch.dtype, torch.dtype], device: torch.device) -> None:
    check_product("Q4_0", 5, 130, 96, device, dtypes)


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 65, 129])
def test_numbers_of_rows(rows: int, device: torch.device) -> None:
    check_product("Q6_K", rows, 129, 256, device, BF16)


@pytest.mark.parametrize(("rows", "name"), [(1, "Q4_K"), (20, "fp8 blocks"), (40, "int4 rows")])
def test_splits(rows: int, name: str, device: torch.device) -> None:
    weight = check_product(name, rows, 66, 4096, device, BF16)
    assert configuration(rows, weight, SMS).splits > 1


@pytest.mark.parametrize(("group", "columns"), [(96, 192), (80, 80), (16, 48)])
def test_groups_that_are_no_power_of_two(group: int, columns: int, device: torch.device) -> None:
    kind = QuantFormat("odd", 4, group, offsets="zero_point")
    block = random_block(kind, 9, columns, 1)
    weight, x = pack([BlockRows(kind, block)], device), torch.eye(columns, dtype=torch.bfloat16, device=device)
    out = torch.empty(columns, 9, dtype=torch.bfloat16, device=device)
    ones, workspace = torch.ones(9, device=device), torch.empty(max(1, workspace_size(weight, SMS)), device=device)
    product(x, weight, ones, torch.zeros_like(ones), out, workspace, SMS)
    assert torch.equal(out.cpu(), dequantize(block, kind).to(torch.bfloat16).t())


def test_codes_that_are_no_number_give_none(device: torch.device) -> None:
    kind = QuantFormat("fp8", 8, 32, values="e4m3", scale="float32")
    block = random_block(kind, 2, 32, 0)
    block.codes[0, 3], block.codes[1, 4] = 0x7F, 0xFF
    out = torch.empty(2, 32, device=device)
    embed(pack([BlockRows(kind, block)], device), torch.arange(2, device=device), 1.0, out)
    assert out.isnan().nonzero().tolist() == [[0, 3], [1, 4]]


def test_bytes_are_those_of_the_format(device: torch.device) -> None:
    for name in FORMATS:
        weight, _ = packed(name, 64, 512, device)
        assert weight.num_bytes == weight.kind.num_bytes(weight.shape)


def test_arguments_are_checked(device: torch.device) -> None:
    weight, _ = packed("Q4_0", 32, 64, device)
    ones, x = torch.ones(32, device=device), torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    out = torch.empty(2, 32, dtype=torch.bfloat16, device=device)
    for changes, message in (
        ({"x": x.float()}, "x: must be"),
        ({"x": x[:, :32]}, "x: must be"),
        ({"bias": ones[:3]}, "bias: must be"),
        ({"out": out[:1]}, "out: must be"),
    ):
        arguments = {"x": x, "weight": weight, "ones": ones, "bias": ones, "out": out} | changes
        with pytest.raises(ValueError, match=message):
            product(**arguments, workspace=None, num_sms=SMS)
