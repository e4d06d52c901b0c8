"""Linear layers of a GPU: products with 8-bit weights, what quantizes, and the layers made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.interface import DeviceError
from executor_svc.gpu.kernels.linear_w8 import configuration, linear_w8, workspace_size
from executor_svc.gpu.kernels.quantize import quantize_fp8, quantize_int8, quantize_rows
from executor_svc.gpu.linear import GpuLinear, Quantization, SumsWorkspace, W8Linear, check_quantization, make_linear

SMS = 132
FP8 = torch.float8_e4m3fn
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Largest relative error of rounding."""


def guarded(values: Tensor, device: torch.device) -> Tensor:
    """The same values with bytes after them that are NaN in every float format, and -1 as integers."""
    size = values.numel()
    memory = torch.full(((size + 4096) * values.element_size(),), 0xFF, dtype=torch.uint8, device=device)
    found = memory.view(values.dtype)[:size].view(values.shape)
    return found.copy_(values)


def random_weight(out_features: int, in_features: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, (out_features, in_features), generator=generator).to(torch.int8)
    return (torch.randn(out_features, in_features, generator=generator) * 60).clamp(-448, 448).to(FP8)


def check_product(
    rows: int,
    out_features: int,
    in_features: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.int8,
    out_dtype: torch.dtype = torch.float32,
) -> None:
    generator = torch.Generator().manual_seed(rows + out_features)
    x = guarded(torch.randn(rows, in_features, generator=generator).to(dtype), device)
    weight = guarded(random_weight(out_features, in_features, weight_dtype, generator), device)
    scale = guarded(torch.rand(out_features, generator=generator) / 100, device)
    bias = guarded(torch.randn(out_features, generator=generator), device)
    size = workspace_size(out_features, in_features, SMS)
    workspace = torch.full((size,), float("nan"), device=device) if size else None
    whole = torch.full((rows * out_features + 999,), 7.0, dtype=out_dtype, device=device)
    out = whole[: rows * out_features].view(rows, out_features)
    linear_w8(x, weight, scale, bias, out, workspace, SMS)

    wide = weight.double() * scale.double()[:, None]
    expected = reference.linear(x, wide, bias)
    magnitudes = x.double().abs() @ wide.abs().t() + bias.double().abs()
    # Products are exact; each sum, and the product with the scale, is rounded or cut to float32.
    bound = (in_features + 4) * 2**-23 * magnitudes + UNIT[out_dtype] * expected.abs() + 1e-7
    assert ((out.double() - expected).abs() <= bound).all()
    assert (whole[rows * out_features :] == 7).all()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("weight_dtype", [torch.int8, FP8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_is_float", [True, False])
def test_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype, out_is_float: bool, device: torch.device) -> None:
    check_product(3, 130, 2064, device, dtype, weight_dtype, torch.float32 if out_is_float else dtype)
    check_product(70, 130, 80, device, dtype, weight_dtype, torch.float32 if out_is_float else dtype)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_numbers_of_rows(rows: int, device: torch.device) -> None:
    check_product(rows, 144, 272, device)


@pytest.mark.parametrize("out_features", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("in_features", [16, 112, 128, 144])
def test_sizes_of_the_weight(out_features: int, in_features: int, device: torch.device) -> None:
    check_product(5, out_features, in_features, device, weight_dtype=FP8)


@pytest.mark.parametrize(("rows", "in_features"), [(1, 4096), (16, 1040), (20, 2048), (40, 4112)])
def test_splits(rows: int, in_features: int, device: torch.device) -> None:
    assert configuration(rows, 96, in_features, SMS).splits > 1
    check_product(rows, 96, in_features, device, out_dtype=torch.bfloat16)


# Not shrunk: that takes minutes here.
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    rows=st.integers(1, 140),
    out_features=st.integers(1, 200),
    steps=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    weight_dtype=st.sampled_from([torch.int8, FP8]),
)
def test_any_shape(
    rows: int, out_features: int, steps: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> None:
    check_product(rows, out_features, 16 * steps, device, dtype, weight_dtype)


def test_all_int8_numbers_are_exact(device: torch.device) -> None:
    weight = torch.arange(-128, 128).to(torch.int8).to(device).view(16, 16)
    ones, zeros = torch.ones(16, device=device), torch.zeros(16, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(16, 16, device=device)
        linear_w8(torch.eye(16, dtype=dtype, device=device), weight, ones, zeros, out, None, SMS)
        assert torch.equal(out.t(), weight.float())


def test_all_fp8_numbers_are_exact(device: torch.device) -> None:
    codes = torch.arange(256)
    codes[[0x7F, 0xFF]] = 0  # NaN
    weight = codes.to(torch.uint8).to(device).view(FP8).view(16, 16)
    ones, zeros = torch.ones(16, device=device), torch.zeros(16, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(16, 16, device=device)
        linear_w8(torch.eye(16, dtype=dtype, device=device), weight, ones, zeros, out, None, SMS)
        assert torch.equal(out.t(), weight.float())


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 1024), out_features=st.integers(1, 40000), steps=st.integers(1, 2000), sms=st.integers(1, 200)
)
def test_splits_cover_the_inner_dimension_and_fit_the_workspace(
    rows: int, out_features: int, steps: int, sms: int
) -> None:
    in_features = 16 * steps
    found = configuration(rows, out_features, in_features, sms)
    assert (found.splits - 1) * found.split_size < in_features <= found.splits * found.split_size
    assert found.split_size % found.tile.inner == 0
    if found.splits > 1:
        assert rows <= found.tile.rows
        assert found.splits * rows * out_features <= workspace_size(out_features, in_features, sms)


def test_refusals(device: torch.device) -> None:
    def call(**changes: Any) -> None:
        given: dict[str, Any] = {
            "x": torch.zeros(2, 4096, dtype=torch.bfloat16, device=device),
            "weight": torch.zeros(8, 4096, dtype=torch.int8, device=device),
            "scale": torch.ones(8, device=device),
            "bias": torch.zeros(8, device=device),
            "out": torch.zeros(2, 8, device=device),
            "workspace": torch.zeros(1 << 20, device=device),
        }
        linear_w8(**{**given, **changes}, num_sms=SMS)

    call()
    for name, value in {
        "x": torch.zeros(2, 4096, device=device),
        "weight": torch.zeros(8, 4096, dtype=torch.uint8, device=device),
        "scale": torch.ones(9, device=device),
        "bias": torch.zeros(8, dtype=torch.bfloat16, device=device),
        "out": torch.zeros(8, 2, device=device).t(),
        "workspace": None,
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: must be"):
            call(**{name: value})
    with pytest.raises(ValueError, match=r"^x: in_features must be a multiple of 16"):
        call(x=torch.zeros(2, 8, dtype=torch.bfloat16), weight=torch.zeros(8, 8, dtype=torch.int8))


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_fp8])
def test_weights_are_quantized_as_on_the_cpu(quantize: Any, device: torch.device) -> None:
    """Bit for bit, so that a checkpoint is quantized alike everywhere; 16-bit weights often lie on a tie."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)).half()
    narrow, scale = quantize(weight.to(device))
    expected, expected_scale = quantize(weight)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(narrow.cpu().view(torch.int8), expected.view(torch.int8))


def test_errors_of_quantized_weights() -> None:
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]
    weight[7] = 0
    weight[8, 3:] = 0
    largest = weight.abs().amax(1, keepdim=True)
    narrow, scale = quantize_int8(weight.to(torch.bfloat16))
    exact = weight.to(torch.bfloat16).double()
    assert ((narrow.double() * scale.double()[:, None] - exact).abs() <= largest / 254 * 1.01).all()
    assert (narrow.abs().amax(1) == torch.where(largest[:, 0] > 0, 127, 0)).all()
    fp8, scale = quantize_fp8(weight.to(torch.bfloat16))
    error = (fp8.double() * scale.double()[:, None] - exact).abs()
    assert (error <= torch.maximum(exact.abs() * 2**-4, scale[:, None] * 2**-10) * 1.0001).all()
    for quantize in (quantize_int8, quantize_fp8):
        with pytest.raises(ValueError, match="not all numbers are finite"):
            quantize(torch.tensor([[1.0, float("nan")]]))


@pytest.mark.parametrize("columns", [16, 2047, 2048, 2049, 5000])
def test_rows_are_quantized(columns: int, device: torch.device) -> None:
    x = torch.randn(4, columns, generator=torch.Generator().manual_seed(columns)) * torch.tensor(
        [[1e-3], [1], [50], [1]]
    )
    x[3] = 0
    rows = guarded(x.to(torch.bfloat16), device)
    narrow = torch.empty(rows.shape, dtype=FP8, device=device)
    scales = torch.empty(4, device=device)
    quantize_rows(rows, narrow, scales)
    exact, found = rows.double(), narrow.double() * scales.double()[:, None]
    error = (found - exact).abs()
    assert (error <= torch.maximum(exact.abs() * 2**-4, scales[:, None] * 2**-10) * 1.0001).all()
    assert scales[3] == 1
    rows[1, columns - 1] = float("nan")
    rows[2, 0] = float("inf")
    with np.errstate(invalid="ignore"):  # the interpreter's
        quantize_rows(rows, narrow, scales)
    assert scales.isnan().tolist() == [False, True, True, False]


LAYERS: list[Quantization] = ["none", "int8", "fp8", "fp8_w8a8"]
ERROR: dict[Quantization, float] = {"none": 0.004, "int8": 0.01, "fp8": 0.04, "fp8_w8a8": 0.08}
"""Of results, relative to their root mean square: numbers of 8 bits (or fewer) err as random."""


def layer(quantization: Quantization, device: torch.device, sizes: tuple[int, int], biased: bool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(sizes, generator=generator).to(torch.bfloat16).to(device)
    bias = torch.randn(sizes[0], generator=generator).to(torch.bfloat16).to(device) if biased else None
    made: GpuLinear = make_linear(weight, bias, quantization, SumsWorkspace(device))
    return made, weight, bias


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("quantization", LAYERS)
def test_layers(quantization: Quantization, biased: bool, device: torch.device) -> None:
    made, weight, bias = layer(quantization, device, (96, 1024), biased)
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    expected = reference.linear(x, weight, bias)
    assert (made.out_features, made.in_features) == (96, 1024)
    in_float = made(x, out_dtype=torch.float32)
    assert in_float.dtype == torch.float32
    error = (in_float.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= ERROR[quantization]
    rounded = made(x)
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() - in_float).abs() <= 2**-6 * in_float.abs() + 2**-7).all()
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(5, 96, dtype=dtype, device=device)
        assert made(x, out=out) is out
        assert torch.equal(out, made(x, out_dtype=dtype))
    with pytest.raises(ValueError, match="out_dtype"):
        made(x, out=torch.empty(5, 96, device=device), out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out_dtype"):
        made(x, out_dtype=torch.float16)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_inner_sizes_that_are_no_multiple_of_16(quantization: Quantization, device: torch.device) -> None:
    made, weight, bias = layer(quantization, device, (33, 100), biased=True)
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    expected = reference.linear(x, weight, bias)
    error = (made(x, out_dtype=torch.float32).double() - expected).square().mean().sqrt()
    assert error <= ERROR[quantization] * expected.square().mean().sqrt()


def test_layers_share_a_workspace(device: torch.device) -> None:
    workspace = SumsWorkspace(device)
    weights = [torch.eye(size, 2048, dtype=torch.bfloat16, device=device) for size in (64, 192, 128)]
    made = [W8Linear(weight, None, "int8", workspace) for weight in weights]
    x = torch.arange(2048, device=device).to(torch.bfloat16).expand(2, 2048).contiguous()
    for linear, weight in zip(made, weights, strict=True):
        assert torch.allclose(linear(x).float(), x[:, : weight.shape[0]].float(), rtol=2**-7)


def test_no_rows(device: torch.device) -> None:
    for quantization in LAYERS:
        made, _, _ = layer(quantization, device, (32, 64), biased=True)
        assert made(torch.empty(0, 64, dtype=torch.bfloat16, device=device)).shape == (0, 32)


def test_what_layers_refuse(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = torch.zeros(32, 24, dtype=torch.bfloat16, device=device)
    with pytest.raises(DeviceError, match=r"--quantization fp8_w8a8: .*24 to 32.*multiples of 16"):
        make_linear(narrow, None, "fp8_w8a8", SumsWorkspace(device))
    with pytest.raises(DeviceError, match="--quantization int8: needs --dtype bfloat16 or float16, not float32"):
        make_linear(narrow.float(), None, "int8", SumsWorkspace(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    ampere = torch.device("cuda")
    narrowest: list[Quantization] = ["fp8", "fp8_w8a8"]
    for quantization in narrowest:
        with pytest.raises(DeviceError, match=rf"--quantization {quantization}: .*8\.9 or later, this has 8\.0"):
            check_quantization(quantization, torch.bfloat16, ampere)
    check_quantization("int8", torch.bfloat16, ampere)
