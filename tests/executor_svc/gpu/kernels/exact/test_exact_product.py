"""Exact products against their float64 meaning, and rows against themselves beside any number of others.

The interpreter multiplies by numpy: where bits are compared, in the order of columns (`ordered_products`). That tiles
of all numbers of rows are of the same instructions is read from their PTX (`Variant.products`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from executor_svc.device import reference
from executor_svc.gpu.exact.linear import multiply_widened
from executor_svc.gpu.kernels.exact.few_bits import (
    exact_few_bits,
    few_bits_parts,
    few_bits_sums_size,
    few_bits_tiles,
    variants,
)
from executor_svc.gpu.kernels.exact.product import exact_product, exact_product_of_experts, exact_product_of_heads
from executor_svc.gpu.kernels.exact.product import variants as product_variants
from executor_svc.gpu.kernels.exact.tiles import EXPERT_ROWS, num_parts, part_columns, product_tiles, sums_size
from executor_svc.gpu.kernels.experts.blocks import RowBlocks
from executor_svc.gpu.kernels.linear_w8 import W8Tile, linear_w8, workspace_size
from executor_svc.gpu.kernels.quantize import quantize_fp8, quantize_int8, quantize_rows
from tests.executor_svc.gpu.kernels.test_few_bits_linear import made
from tests.helpers.marks import short_and_long

FP8 = torch.float8_e4m3fn
KINDS = ("bfloat16", "float16", "float32", "int8", "fp8", "fp8_w8a8")
COUNTS = (1, 4, 16, 64, 70)


class Product:
    """Rows and a weight of one of KINDS."""

    def __init__(self, kind: str, rows: int, out_features: int, in_features: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(rows + out_features)
        dtype = getattr(torch, kind, torch.bfloat16) if kind != "int8" else torch.bfloat16
        self.x = torch.randn(rows, in_features, generator=generator).to(dtype).to(device)
        weight = torch.randn(out_features, in_features, generator=generator).to(dtype).to(device)
        self.bias = torch.randn(out_features, generator=generator).to(device)
        self.narrow = kind == "fp8_w8a8"
        self.scale: Tensor | None = None
        self.weight = weight
        if kind in ("int8", "fp8", "fp8_w8a8"):
            self.weight, self.scale = (quantize_int8 if kind == "int8" else quantize_fp8)(weight)
        size = sums_size(out_features, in_features)
        self._workspace = torch.full((size,), float("nan"), device=device) if size else None

    @property
    def tiles(self) -> tuple[W8Tile, ...]:
        return product_tiles(self.weight.element_size(), self.narrow)

    def run(self, count: int, tile: W8Tile | None = None, first: int = 0) -> Tensor:
        """Products of `count` rows from `first` on, to columns in the middle of a wider tensor."""
        x, scales = self.x[first : first + count], None
        if self.narrow:
            narrow = torch.empty(x.shape, dtype=FP8, device=x.device)
            scales = torch.empty(count, dtype=torch.float32, device=x.device)
            quantize_rows(x, narrow, scales)
            x = narrow
        whole = torch.full((count + 1, len(self.weight) + 9), 7.0, device=x.device)
        out = whole[:-1, 8:-1]
        exact_product(x, self.weight, self.bias, out, self._workspace, self.scale, scales, tile)
        assert (whole[-1] == 7).all()
        assert (whole[:, :8] == 7).all()
        assert (whole[:, -1] == 7).all()
        return out

    def check(self, found: Tensor) -> None:
        wide = self.weight.double() if self.scale is None else self.weight.double() * self.scale.double()[:, None]
        expected = reference.linear(self.x[: len(found)], wide, self.bias)
        size = self.x[: len(found)].double().abs() @ wide.abs().t() + self.bias.double().abs()
        eps = 2**-4 if self.narrow else (self.x.shape[1] + 6) * 2**-23
        assert ((found.double() - expected).abs() <= eps * size + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str, device: torch.device) -> None:
    for out_features, in_features in ((72, 48), (100, 1088), (16 if kind == "fp8_w8a8" else 1, 64)):
        some = Product(kind, 66, out_features, in_features, device)
        for count in (3, 66):
            some.check(some.run(count))


def bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_beside_any_others(kind: str, device: torch.device, ordered_products: None) -> None:
    """In each tile; of a weight whose columns are in parts, by programs of their own or by one."""
    some = Product(kind, COUNTS[-1], 66, 1100 if kind != "fp8_w8a8" else 1104, device)
    assert num_parts(66, some.x.shape[1]) == 2
    whole = bits(some.run(COUNTS[-1]))
    for tile in some.tiles:
        for count in COUNTS if tile.rows == 64 else COUNTS[:2]:
            assert torch.equal(bits(some.run(count, tile)), whole[:count]), (tile.rows, count)
    assert torch.equal(bits(some.run(1, first=69)), whole[69:])
    assert torch.equal(bits(some.run(5, first=33)), whole[33:38])


def test_fast_products_depend_on_the_number_of_rows(device: torch.device, ordered_products: None) -> None:
    """Or the comparisons above find nothing."""
    some = Product("int8", 70, 66, 4096, device)
    assert some.scale is not None
    workspace = torch.empty(workspace_size(66, 4096, 132), device=device)
    outs = []
    for count in (1, 70):
        out = torch.empty(count, 66, device=device)
        linear_w8(some.x[:count], some.weight, some.scale, some.bias, out, workspace, 132)
        outs.append(bits(out))
    assert not torch.equal(outs[0], outs[1][:1])


def test_parts_follow_the_shape_alone() -> None:
    """Of small weights, whose tiles are few; all are whole steps of the kernels."""
    assert (num_parts(128256, 4096), num_parts(28672, 4096)) == (1, 1)
    assert (num_parts(4096, 4096), num_parts(4096, 14336), num_parts(1024, 3072)) == (2, 2, 6)
    assert num_parts(64, 256) == 1
    assert not any(part_columns(out, columns) % 128 for out in (64, 1024, 4096) for columns in (100, 3000, 14336))


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are seen under Triton's interpreter")
def test_launches_differ_in_rows_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tile that defines the bits nothing else changes with the number of rows, but who adds the parts."""
    launched: list[dict[str, Any]] = []
    run = InterpretedFunction.run

    def noted(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__name__ == "exact_product_kernel":
            numbers = dict(zip(self.arg_names, args, strict=False))
            launched.append({name: value for name, value in (numbers | kwargs).items() if type(value) in (int, bool)})
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    some = Product("bfloat16", 70, 66, 1100, device)
    for count in COUNTS:
        some.run(count)
    assert [each["PARTS"] for each in launched] == [2, 2, 2, 2, 1]
    assert (
        len({(*each.items(),) for each in ({**one, "rows": 0, "PARTS": 0, "out_stride": 0} for one in launched)}) == 1
    )


def test_products_of_heads(device: torch.device, ordered_products: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 3, 80, generator=generator).to(device, torch.bfloat16)[:, :, :72]
    weight = torch.randn(3, 40, 72, generator=generator).to(device, torch.bfloat16)
    whole = torch.full((70, 3, 48), 7.0, device=device)
    exact_product_of_heads(x, weight, whole[:, :, :40])
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    assert ((whole[:, :, :40].double() - expected).abs() < 1e-4).all()
    assert (whole[:, :, 40:] == 7).all()
    alone = torch.empty(1, 3, 40, device=device)
    exact_product_of_heads(x[13:14], weight, alone)
    assert torch.equal(bits(alone), bits(whole[13:14, :, :40]))


def blocks_of(counts: list[int], device: torch.device) -> RowBlocks:
    """Of experts with so many rows each, the last of which comes first."""
    table, first = [], 0
    for expert, count in reversed([*enumerate(counts)]):
        for begin in range(0, count, EXPERT_ROWS):
            table.append([expert, first + begin, min(EXPERT_ROWS, count - begin), 0])
        first += count
    words = torch.tensor(table, dtype=torch.int32, device=device)
    return RowBlocks(words, torch.tensor([len(table)], dtype=torch.int32, device=device), len(table) + 2, EXPERT_ROWS)


def test_products_of_experts(device: torch.device, ordered_products: None) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 40, 96, generator=generator).to(device, torch.bfloat16)
    x = torch.randn(75, 96, generator=generator).to(device, torch.bfloat16)
    bias = torch.randn(2, 40, generator=generator).to(device)
    many, one = torch.empty(75, 40, device=device), torch.empty(1, 40, device=device)
    exact_product_of_experts(x, weight, None, bias, many, blocks_of([70, 5], device))
    for rows, expert in ((slice(0, 5), 1), (slice(5, 75), 0)):
        expected = reference.linear(x[rows], weight[expert].double(), bias[expert])
        assert ((many[rows].double() - expected).abs() < 1e-4).all()
    exact_product_of_experts(x[60:61], weight, None, bias, one, blocks_of([1, 0], device))
    assert torch.equal(bits(one), bits(many[60:61]))


@pytest.mark.parametrize("name", short_and_long(["Q4_K", "Q6_K", "Q4_0", "Q8_0", "gptq 4"], ["Q4_K", "Q8_0"]))
def test_few_bits_are_the_same_beside_any_others(name: str, device: torch.device, ordered_products: None) -> None:
    """In each tile, and by the widened weight."""
    columns, rows = 1280, 66
    _, _, weight = made(name, rows, columns, device)
    assert few_bits_parts(weight)[0] == 2
    x = torch.randn(70, columns, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(device)
    workspace = torch.full((few_bits_sums_size(weight) + rows * columns,), float("nan"), device=device)
    _, reference_tile, _ = few_bits_tiles()
    whole = torch.empty(70, rows, device=device)
    exact_few_bits(x, weight, bias, whole, workspace, reference_tile)
    for tile in few_bits_tiles():
        for count in (1, 16) if tile.rows != 64 else (1, 4, 64):
            out = torch.empty(count, rows, device=device)
            exact_few_bits(x[:count], weight, bias, out, workspace, tile)
            assert torch.equal(bits(out), bits(whole[:count])), (tile.rows, count)
    widened = torch.empty(70, rows, device=device)
    multiply_widened(x, weight, bias, widened, workspace, product_tiles(2)[1])
    assert torch.equal(bits(widened), bits(whole))


def test_what_is_compiled_must_have_one_kind_of_instruction() -> None:
    """Of all numbers of rows of a dtype: the compiler's output is refused else. N alone may differ."""
    for listed in (product_variants(), variants()):
        for arch, least in ((90, 10), (80, 6)):
            kinds: dict[str, set[str]] = {}
            for each in listed:
                if arch in each.archs and each.signature["x"] != "*fp32":
                    (instruction,) = each.products[arch]
                    name, _, shape = instruction.partition(" ")
                    without_n = shape if arch == 80 else "k".join((shape.split("n")[0], shape.split("k")[1]))
                    kinds.setdefault(each.signature["x"], set()).add(f"{name} {without_n}")
            assert len([each for each in listed if arch in each.archs]) >= least
            assert all(len(found) == 1 for found in kinds.values()), kinds


def test_wrong_arguments_are_named(device: torch.device) -> None:
    some = Product("bfloat16", 2, 66, 1100, device)
    out = torch.empty(2, 66, device=device)
    with pytest.raises(ValueError, match="workspace: must be 264 float32"):
        exact_product(some.x, some.weight, None, out, None)
    with pytest.raises(ValueError, match=r"weight: must be .* torch.bfloat16 or of 8 bits"):
        exact_product(some.x, some.weight.float(), None, out, None)
    with pytest.raises(ValueError, match="out: must be"):
        exact_product(some.x, some.weight, None, out[:, :-1], None)
