"""Products with int8 activations against the numpy reference, to the bit: every format, level and tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.isa import Isa, level
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.quantized.launches import may_be_gated
from executor_svc.cpu.kernels.quantized.layout import PackedLayout
from executor_svc.cpu.stored_linear import CpuStoredLinear, QuantizedActivations, int8_rows
from executor_svc.device import int8_reference
from executor_svc.device.dequantize import dequantize
from executor_svc.device.kernels import GatedActivation
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows, StoredLinear
from executor_svc.models.gguf.block_types import BLOCK_TYPES
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.processors import ISAS
from tests.executor_svc.cpu.kernels.quantized.formats import FORMATS, INT8_ROWS, Q4_0, Q4_K, Q6_K, Q8_0, format_of
from tests.executor_svc.cpu.kernels.quantized.formats import random_block as any_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows
from tests.helpers.marks import short_and_long

F32, BF16 = torch.float32, torch.bfloat16
OUT = 75
ROWS = (1, 2, 3, 5, 6, 7, 11, 13, 16, 23, 40, 97)
"""All heights of tiles, whole and partial tiles of AMX, and more than one item's."""
NAMES = tuple(name for name in FORMATS if not name.startswith("fp8"))
_FEW = {"Q4_0", "IQ4_NL", "Q6_K", "Q8_0", "mxfp4", INT8_ROWS, "gptq 4"}
"""Formats on the levels whose kernels are made of pieces of the other two's: avx512 and avx-vnni."""
WHOLE_ROWS = (INT8_ROWS, "int4 rows", "gptq 4", "Q4_1", "mxfp4")
"""Formats with several groups, too: their integer sums end with a group."""


def _isas() -> dict[str, Isa]:
    """Return the levels here but for those with the same instructions, and AVX-VNNI's kernels.

    Where a processor has VPDPBUSD for 512 bits only under AVX-512's names, LLVM writes that of 256 bits so.
    """
    found = {name: isa for name, isa in ISAS.items() if name not in ("avx512-bf16", "avx-vnni")}
    vnni = level("avx-vnni")
    if "avx-vnni" in ISAS:
        found["avx-vnni"] = vnni
    elif "avx512-vnni" in ISAS:
        found["avx-vnni"] = replace(vnni, flags=vnni.flags.replace("+avxvnni", "+avx512vl,+avx512vnni"))
    return found


LEVELS = _isas()


SHORT: dict[str, tuple[str, ...]] = {
    "avx2": ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q2_K", "IQ4_NL", "mxfp4", INT8_ROWS, "int4 rows"),
    "avx-vnni": ("Q8_0", "gptq 4"),
    "avx512": ("Q4_0", "gptq 4", INT8_ROWS),
    "avx512-vnni": ("Q4_1", "Q5_0", "Q6_K", "Q3_K", "IQ2_S", "gptq 8", "int4 by 16", "mxfp4", INT8_ROWS),
    "amx": ("Q4_K", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "IQ4_XS", "gptq 4", INT8_ROWS, "int4 rows"),
}
"""Formats by level in `make test`, where all of these levels are: vectors of each width unpack each kind of code, and
each level multiplies several."""
ENDS = (next(iter(LEVELS)), next(reversed(LEVELS)))
"""Of what needs all levels in `make test-long` alone."""


def cases(names: tuple[str, ...]) -> list[Any]:
    """Return levels and formats for `parametrize`."""
    found = [
        (isa, name) for isa in LEVELS for name in names if name in _FEW or isa not in ("avx512", "avx-vnni")
    ]  # the pieces of other kernels there are those of avx2 and avx512-vnni
    few = SHORT if SHORT.keys() <= LEVELS.keys() else dict.fromkeys(LEVELS, names)
    return short_and_long(found, [(isa, name) for isa, name in found if name in few[isa]])


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(isa=LEVELS[request.param])


on_levels = pytest.mark.parametrize("kernels", short_and_long(LEVELS, set(ENDS)), indirect=True)


class WholeRows(BlockRows):
    whole_row_activations = True


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(
    kernels: CpuKernels,
    dtype: torch.dtype,
    *parts: QuantRows,
    bias: Tensor | None = None,
    option: QuantizedActivations = "int8",
) -> CpuStoredLinear:
    linear = CpuStoredLinear("test", StoredLinear(parts, dtype), bias, kernels, option)
    linear.read()
    return linear


def expected(x: Tensor, block: QuantBlock, kind: QuantFormat, whole_row: bool = False) -> Tensor:
    rows = int8_reference.quantize_rows(x.float().numpy(), whole_row)
    return torch.from_numpy(int8_reference.product(rows, block, kind))


def same(found: Tensor, wanted: Tensor) -> bool:
    """Compare to the bit; NaN equals NaN."""
    assert torch.equal(found.isnan(), wanted.isnan())
    return equal_bits(found.nan_to_num(0.5), wanted.nan_to_num(0.5))


@pytest.mark.sampled(2)
@on_levels
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_in_place_of_their_product_change_no_bit(kernels: CpuKernels, activation: GatedActivation) -> None:
    """With several items a row, blocks of 16 rows, several formats, and parts that need the product itself."""
    activate = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_tanh_mul}[activation]
    for dtype in (F32, BF16):
        for names, columns in ((("Q8_0",), 2112), (("Q4_K", "Q6_K"), 512), (("gptq 4",), 384), ((INT8_ROWS,), 96)):
            kinds = [format_of(name, columns) for name in names]
            rows = WholeRows if names == (INT8_ROWS,) else BlockRows
            parts = [rows(kind, any_block(kind, OUT, columns, 5)) for kind in kinds]
            linear = made(kernels, dtype, *parts)
            assert may_be_gated(linear.parts) == (names != (INT8_ROWS,))
            for count in (1, 7, 33):
                gate_up = (randn(count, count, 2 * columns) * 3).to(dtype)
                assert equal_bits(linear.of_gated(gate_up, activation), linear(activate(gate_up)))


def extreme(kind: QuantFormat, rows: int, columns: int) -> QuantBlock:
    """Return a block whose codes are all the largest, or the largest and the smallest by halves of each step."""
    block = any_block(kind, rows, columns, 3)
    # The largest numbers of e2m1, of both signs, have codes 7 and 15.
    largest, smallest = (7, 15) if kind.values == "e2m1" else (2**kind.bits - 1, 0)
    block.codes[:] = largest
    block.codes[rows // 2 :].unflatten(1, (-1, 2))[:, ::2] = smallest
    if kind.scale == "e8m0":
        block.scales[0, 0], block.scales[1, 0] = 0, 255
    return block


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kernels", "name"), cases(NAMES), indirect=["kernels"])
def test_every_number_of_rows_has_the_bits_of_the_reference(kernels: CpuKernels, name: str) -> None:
    """Odd numbers of rows of the weight; with a scale for a row, also columns that end within a step."""
    inner = 110 if "rows" in name else 768
    kind = format_of(name, inner)
    block = any_block(kind, OUT, inner, 5)
    linear = made(kernels, BF16, BlockRows(kind, block))
    x = randn(6, ROWS[-1], inner).bfloat16()
    wanted = expected(x, block, kind)
    for count in ROWS:
        assert same(linear(x[:count], F32), wanted[:count].bfloat16().float())
    if kind == Q6_K:
        assert same(linear(x), wanted.bfloat16())
        wide = randn(6, ROWS[-1], inner)
        assert same(made(kernels, F32, BlockRows(kind, block))(wide), expected(wide, block, kind))


@pytest.mark.parametrize("name", short_and_long(BLOCK_TYPES, ("TQ1_0", "IQ3_XXS", "IQ1_M")))
def test_types_of_gguf_have_the_bits_of_the_reference(name: str) -> None:
    kind = BLOCK_TYPES[name].format
    block = any_block(kind, 40, 512, 23)
    x = randn(24, 17, 512).bfloat16()
    linear, wanted = made(CpuKernels(isa=LEVELS[ENDS[1]]), BF16, BlockRows(kind, block)), expected(x, block, kind)
    for count in (1, 17):
        assert same(linear(x[:count], F32), wanted[:count].bfloat16().float())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kernels", "name"), cases(WHOLE_ROWS), indirect=["kernels"])
def test_one_scale_for_a_row_of_x(kernels: CpuKernels, name: str) -> None:
    inner = 110 if "rows" in name else 768
    kind = format_of(name, inner)
    block = any_block(kind, OUT, inner, 7)
    linear = made(kernels, BF16, WholeRows(kind, block))
    x = randn(8, 26, inner).bfloat16()
    wanted = expected(x, block, kind, whole_row=True).bfloat16()
    assert not equal_bits(wanted, expected(x, block, kind).bfloat16())
    for count in (1, 4, 13, 26):
        assert same(linear(x[:count]), wanted[:count])


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kernels", "name"), cases(NAMES), indirect=["kernels"])
def test_codes_and_numbers_at_their_ends(kernels: CpuKernels, name: str) -> None:
    """Where 16-bit sums would saturate if they were any longer; and scales at infinity, of 0 and of tiny rows."""
    inner = 256
    kind = format_of(name, inner)
    block = extreme(kind, 40, inner)
    x = torch.full((7, inner), 3.0)
    x[1], x[2, ::2], x[3, 1::2] = -3.0, -3.0, -3.0
    x[4], x[5], x[6, :32] = 0.0, 1e-39, 0.0
    x = x.bfloat16()
    wanted = expected(x, block, kind).bfloat16().float()
    assert same(made(kernels, BF16, BlockRows(kind, block))(x, F32), wanted)


@on_levels
@pytest.mark.parametrize("whole_row", [False, True])
def test_nan_and_infinity_stay_in_their_row(kernels: CpuKernels, whole_row: bool) -> None:
    inner = 110
    kind = format_of(INT8_ROWS, inner)
    block = any_block(kind, OUT, inner, 9)
    linear = made(kernels, BF16, (WholeRows if whole_row else BlockRows)(kind, block))
    x = randn(10, 9, inner).bfloat16()
    x[2, 109], x[5, 0], x[7, 33] = float("nan"), float("inf"), float("-inf")
    found = linear(x)
    assert same(found, expected(x, block, kind, whole_row).bfloat16())
    assert found[[2, 5, 7]].isnan().all()
    assert found[[0, 1, 3, 4, 6, 8]].isfinite().all()


@pytest.mark.sampled(1)
@on_levels
def test_parts_of_several_formats_with_orders_of_columns_and_a_bias(kernels: CpuKernels) -> None:
    """Q4_K_M mixes formats within one fused projection; fp8 multiplies rows as they are."""
    inner = 512
    order = torch.randperm(inner, generator=torch.Generator().manual_seed(1))
    kinds = (Q4_K, Q6_K, Q8_0)
    blocks = [any_block(kind, rows, inner, 11) for kind, rows in zip(kinds, (33, 64, 7), strict=True)]
    orders = (None, order, order)
    parts = [BlockRows(*each) for each in zip(kinds, blocks, orders, strict=True)]
    fp8 = format_of("fp8 blocks", inner)
    plain = BlockRows(fp8, any_block(fp8, 20, inner, 12))
    bias, x = randn(13, 124), randn(14, 10, inner)
    found = made(kernels, F32, *parts, plain, bias=bias)(x)
    wanted = [
        expected(x if each is None else x[:, each].contiguous(), block, kind)
        for kind, block, each in zip(kinds, blocks, orders, strict=True)
    ]
    wanted = [torch.cat(wanted, 1) + bias[:-20], made(kernels, F32, plain, bias=bias[-20:], option="off")(x)]
    assert same(found, torch.cat(wanted, 1))


@on_levels
def test_one_scale_for_a_row_of_fewer_columns_than_a_step(kernels: CpuKernels) -> None:
    kind = format_of(INT8_ROWS, 24)
    block = any_block(kind, OUT, 24, 21)
    x = randn(22, 5, 24)
    assert same(made(kernels, F32, BlockRows(kind, block))(x), expected(x, block, kind))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_bits(threads: int) -> None:
    kind = Q4_K
    rows = BlockRows(kind, any_block(kind, 500, 2560, 15))
    one, several = (made(CpuKernels(count), BF16, rows) for count in (1, threads))
    for count in (1, 16, 130):
        x = randn(16, count, 2560).bfloat16()
        assert equal_bits(one(x), several(x))


def test_parts_run_together() -> None:
    """A thread that has no more of a part goes on with the next; only the first launch of each kind waits."""
    kernels, x = CpuKernels(2), randn(17, 5, 512)
    parts = [BlockRows(kind, any_block(kind, 200, 512, seed)) for seed, kind in enumerate((Q4_K, Q8_0, Q4_K))]
    linear = made(kernels, F32, *parts)
    with kernels.recording() as recording:
        y = linear(x)
    recording.program().run(rows=5)
    assert equal_bits(y, linear(x))
    together = [(launch.kernel.split("_")[0], launch.joins) for launch in recording.launches]
    converted = [("quantize", False), ("quantize", True)]
    assert together == [*converted, ("int8", False), ("int8", True), ("int8", True)]


def test_numbers_are_near_those_of_the_weight() -> None:
    """The reference itself: within half a step of x of the product with the dequantized weight."""
    for name in NAMES:
        kind = format_of(name, 512)
        block = any_block(kind, 40, 512, 17)
        x, weight = randn(18, 5, 512), dequantize(block, kind).double()
        for whole_row in (False, True):
            rows = int8_reference.quantize_rows(x.numpy(), whole_row)
            found = int8_reference.product(rows, block, kind)
            steps = np.repeat(rows.scales, rows.step, axis=1)
            bound = torch.from_numpy(steps).double() / 2 @ weight.abs().t()
            slack = 1e-3 * (x.double().abs() @ weight.abs().t()) + 1e-6
            assert ((torch.from_numpy(found).double() - x.double() @ weight.t()).abs() <= bound * 1.001 + slack).all()


def test_the_option_decides() -> None:
    layout = PackedLayout(Q4_0, 64)
    for isa in LEVELS.values():
        assert int8_rows(isa, layout, False, "off") is None
        assert int8_rows(isa, layout, False, "int8") is not None
        assert int8_rows(isa, PackedLayout(format_of("fp8 blocks", 128), 128), False, "int8") is None
    assert int8_rows(Isa("other", "generic", frozenset(), ""), layout, False, "int8") is None
    kernels = CpuKernels(isa=LEVELS[ENDS[0]])
    rows = BlockRows(Q4_0, any_block(Q4_0, 32, 64, 19))
    x = randn(20, 2, 64)
    assert not equal_bits(made(kernels, F32, rows, option="off")(x), made(kernels, F32, rows)(x))
