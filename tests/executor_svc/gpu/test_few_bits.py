"""Layers of a GPU with weights in few bits, and whole models of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.dense_rows import DenseRows
from executor_svc.device.kernels import WeightRows
from executor_svc.device.stored_linear import QuantFormat, QuantRows, StoredLinear
from executor_svc.gpu.device import GpuDevice
from tests.checkpoints import make_checkpoint
from tests.executor_svc.cpu.kernels.quantized.formats import format_of, random_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows
from tests.executor_svc.gpu.test_runner_options import F16, SHAPE, check, run
from tests.helpers.quantized_layouts import quantize_checkpoint

COLUMNS = 64
ODD = QuantFormat("odd", 8, 8, zero=128)
"""Has no kernel: groups of 8 columns."""


class Dense:
    """Implements `WeightRows` by a tensor."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self.dtype, self.shape = weight, weight.dtype, tuple(weight.shape)

    def blocks(self, num_bytes: int, multiple: int) -> Any:
        yield self._weight

    def whole(self) -> Tensor:
        return self._weight


def part(kind: QuantFormat, rows: int, *, ordered: bool = False) -> BlockRows:
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(rows)) if ordered else None
    return BlockRows(kind, random_block(kind, rows, COLUMNS, rows), order)


def new_device(**options: Any) -> GpuDevice:
    device = GpuDevice(ExecutorConfig(model="none", device="cuda", dtype="bfloat16", **options))
    device.adopt_dtype("bfloat16")
    return device


def mixed(dtype: torch.dtype, device: torch.device) -> StoredLinear:
    """Two parts of one format, a dense one, one in another order of columns, one of a format without a kernel."""
    q4, mxfp4 = format_of("Q4_0", COLUMNS), format_of("mxfp4", COLUMNS)
    dense = Dense(torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype).to(device))
    parts: list[QuantRows | WeightRows] = [part(q4, 5), part(q4, 20), dense, part(q4, 6, ordered=True)]
    return StoredLinear([*parts, part(mxfp4, 30), part(ODD, 3)], dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_linear_of_parts(with_bias: bool, out_dtype: torch.dtype) -> None:
    device = new_device()
    where = device.torch_device
    dense = DenseRows(mixed(device.dtype, where), torch.device("cpu")).whole().double()
    bias = torch.randn(len(dense)).to(device.dtype).to(where) if with_bias else None
    linear = device.prepare_linear("qkv", mixed(device.dtype, where), bias)
    x = torch.randn(4, COLUMNS).to(device.dtype)
    found = linear(x.to(where), out_dtype).cpu().double()
    added = torch.zeros(len(dense)).double() if bias is None else bias.cpu().double()
    expected = x.double() @ dense.t() + added
    magnitude = x.double().abs() @ dense.abs().t() + added.abs()
    unit = 2**-8 if out_dtype == torch.bfloat16 else 2**-14
    assert ((found - expected).abs() <= unit * magnitude).all()
    assert device.few_bits.summary == "Q4_0: weights alone, mxfp4: weights alone, odd: dense"


def test_bytes_are_counted() -> None:
    device, kind = new_device(), format_of("Q4_0", COLUMNS)
    device.prepare_linear("o", StoredLinear([part(kind, 32), part(kind, 64)], device.dtype))
    assert device.few_bits.saved_bytes == 2 * 96 * COLUMNS - kind.num_bytes((96, COLUMNS))


@pytest.mark.parametrize("ordered", [False, True], ids=["packed", "dense"])
def test_a_tied_table_is_held_once(ordered: bool) -> None:
    device, kind = new_device(), format_of("Q8_0", COLUMNS)
    weight = StoredLinear([part(kind, 40, ordered=ordered)], device.dtype)
    dense = DenseRows(weight, torch.device("cpu")).whole()
    embedding, linear = device.prepare_tied("lm_head", weight)
    ids = torch.tensor([39, 0, 7])
    assert torch.equal(embedding(ids.to(device.torch_device), 1.0).cpu(), dense[ids])
    eye = torch.eye(COLUMNS, dtype=device.dtype, device=device.torch_device)
    assert torch.equal(linear(eye).cpu(), dense.t())
    assert device.few_bits.summary == ("Q8_0: dense" if ordered else "Q8_0: weights alone")


def test_float32_models_are_dequantized() -> None:
    device = GpuDevice(ExecutorConfig(model="none", device="cuda", dtype="float32"))
    device.adopt_dtype("float32")
    device.prepare_linear("o", StoredLinear([part(format_of("Q4_0", COLUMNS), 32)], device.dtype))
    assert device.few_bits.summary == "Q4_0: dense"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["w4a16", "fp8 in blocks"])
def test_whole_models(layout: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "dense", "llama", dtype=F16, **SHAPE)
    quantize_checkpoint(folder, layout, tmp_path / "few bits", tmp_path / "wide")
    others: dict[str, Any] = {"quantization": "fp8" if layout == "w4a16" else "int8"}
    check(run(tmp_path / "few bits", dtype="float16"), tmp_path / "wide", F16, others)
