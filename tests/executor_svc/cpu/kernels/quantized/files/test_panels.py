"""Panels that are made of a file's rows are those that weights in memory have, to the byte."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.panels import PanelWriter, new_panels
from executor_svc.cpu.kernels.quantized.files.block_types import MXFP4_APART, READERS
from executor_svc.cpu.kernels.quantized.files.panels import FilePanels
from executor_svc.cpu.kernels.quantized.layout import PackedLayout
from executor_svc.cpu.kernels.quantized.packing import QuantPanelWriter, new_packed
from executor_svc.device.stored_linear import QuantBlock
from executor_svc.models.gguf.block_types import BLOCK_TYPES
from executor_svc.models.quantized.rows import unpack_bytes
from tests.helpers.models.gguf_blocks import random_blocks

ROWS, COLUMNS = 40, 512
"""A panel, and one that is not whole."""


def panels_of(code: Code, made: FilePanels, file: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return all panels of a weight as bytes, each with the kernel's code alone."""
    name = code.function(
        f"test_{made.key}",
        4,
        lambda emit, weight, scales, panel, target: made.make(code, emit, weight, scales, panel, target),
    )
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(code.address(name))
    found = torch.zeros(-(-made.rows // PANEL), made.panel_bytes, dtype=torch.uint8)
    for panel, target in enumerate(found):
        run(file.data_ptr(), 0 if scales is None else scales.data_ptr(), panel, target.data_ptr())
    return found


@pytest.mark.parametrize("name", READERS)
def test_blocks_of_gguf(name: str) -> None:
    kind, code = BLOCK_TYPES[name], Code()
    blocks = torch.from_numpy(np.ascontiguousarray(random_blocks(Type[name], ROWS, COLUMNS, seed=3)))
    file = blocks.reshape(ROWS, -1)
    layout = PackedLayout(kind.format, COLUMNS)
    expected = new_packed(ROWS, layout)
    unpacked = kind.unpack(file.unflatten(1, (-1, READERS[name].num_bytes)))
    QuantPanelWriter(code, layout).write(expected, 0, unpacked)
    made = FilePanels(name, ROWS, file.shape[1], layout.panel_bytes, layout)
    assert torch.equal(panels_of(code, made, file), expected)


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16)])
def test_dense_rows(name: str, dtype: torch.dtype) -> None:
    code, weight = Code(), torch.randn(ROWS, 70).to(dtype)
    expected = new_panels(ROWS, 70, dtype)
    PanelWriter(code).write(expected, 0, weight)
    row_bytes = 70 * dtype.itemsize
    made = FilePanels(name, ROWS, row_bytes, PANEL * row_bytes, None)
    assert torch.equal(panels_of(code, made, weight), expected.view(2, -1).view(torch.uint8))


def test_scales_apart_and_rows_between_which_others_lie() -> None:
    """As gpt-oss has gate and up."""
    code, kind = Code(), replace(BLOCK_TYPES["MXFP4"].format, name="MXFP4")
    generator = torch.Generator().manual_seed(4)
    packed, scales = (
        torch.randint(0, most, (ROWS, 2, columns), dtype=torch.uint8, generator=generator)
        for most, columns in ((256, COLUMNS // 2), (255, COLUMNS // 32))
    )
    layout = PackedLayout(kind, COLUMNS)
    made = FilePanels(MXFP4_APART, ROWS, COLUMNS, layout.panel_bytes, layout, COLUMNS // 16)
    for which in range(2):
        expected = new_packed(ROWS, layout)
        block = QuantBlock(unpack_bytes(packed[:, which], 4), scales[:, which].contiguous())
        QuantPanelWriter(code, layout).write(expected, 0, block)
        assert torch.equal(panels_of(code, made, packed[0, which], scales[0, which]), expected)
