"""Panels of weights in few bits: every code and number lies where `layout` says, in whatever blocks rows come."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.quantized.layout import STEP, PackedLayout, is_supported
from executor_svc.cpu.kernels.quantized.packing import QuantPanelWriter, new_packed
from executor_svc.device.stored_linear import QuantBlock, QuantFormat
from tests.executor_svc.cpu.kernels.quantized.formats import FORMATS, format_of, random_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import part_of

ROWS = 75
_LOW_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_QUARTERS = (0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15)
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def columns_of(name: str) -> int:
    return 70 if "rows" in name else 512


@pytest.fixture(scope="module")
def code() -> Code:
    return Code()


def read_code(step: Tensor, layout: PackedLayout, lane: int, column: int) -> int:
    """Return a code from the bytes of a step, as the words of the layout's description say."""

    def word(plane: int, index: int) -> int:
        place = plane + (index * PANEL + lane) * 4
        return int.from_bytes(bytes(step[place : place + 4].tolist()), "little")

    if layout.kind.bits == 8:
        return word(layout.low_offset, column // 4) >> 8 * (column % 4) & 0xFF
    if layout.kind.bits < 4:
        which, place = column // 16, _QUARTERS.index(column % 16)
        code = word(layout.low_offset, which) >> 2 * place & 3
        if not layout.high_words:
            return code
        return code | (word(layout.high_offset, 0) >> (8 * (place // 4) + 4 * which + place % 4) & 1) << 2
    which, nibble = column // 8, _LOW_ORDER.index(column % 8)
    low = word(layout.low_offset, which) >> 4 * nibble & 0xF
    if not layout.high_words:
        return low
    width, (high_word, shift) = layout.kind.bits - 4, layout.high_shift(which)
    place = 8 * (nibble // 2) + width * (nibble % 2) + shift + 4
    return low | (word(layout.high_offset, high_word) >> place & (2**width - 1)) << 4


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_in_its_place(code: Code, name: str) -> None:
    columns = columns_of(name)
    kind = format_of(name, columns)
    assert is_supported(kind, columns)
    layout = PackedLayout(kind, columns)
    block = random_block(kind, ROWS, columns, 1)
    packed = new_packed(ROWS, layout)
    writer = QuantPanelWriter(code, layout)
    for start, stop in ((0, 32), (32, 45), (45, 70), (70, ROWS)):
        writer.write(packed, start, part_of(block, start, stop))
    for row in (0, 1, 31, 32, 50, 74):
        panel, lane = packed[row // PANEL], row % PANEL
        for index in range(layout.steps):
            start = index // layout.steps_per_block * layout.block_bytes + layout.head_bytes
            step = panel[start + index % layout.steps_per_block * layout.step_bytes :][: layout.step_bytes]
            here = range(index * STEP, min(columns, (index + 1) * STEP))
            assert [read_code(step, layout, lane, column % STEP) for column in here] == block.codes[row][
                index * STEP : (index + 1) * STEP
            ].tolist()
            check_planes(layout, block, packed, row, index)


def check_planes(layout: PackedLayout, block: QuantBlock, packed: Tensor, row: int, index: int) -> None:
    """Compare the numbers of the groups of one step with those of the block."""
    lane, at = row % PANEL, index // layout.steps_per_block
    for field, plane in layout.planes.items():
        source = getattr(block, field)
        source = source.view(_BYTES[plane.item_bytes])
        for group in range(plane.groups):
            start = at * layout.block_bytes + plane.offset + (group * PANEL + lane) * plane.item_bytes
            if not plane.in_head:
                start += layout.head_bytes + index % layout.steps_per_block * layout.step_bytes
            found = packed[row // PANEL][start : start + plane.item_bytes].clone().view(source.dtype)
            assert found.item() == source[row, at if plane.in_head else index * plane.groups + group].item()


def test_a_packed_weight_is_hardly_larger_than_its_file() -> None:
    """Q2_K has 2.625 bits there: each of its 4-bit scales and minimums becomes a byte."""
    stored_bits = {"Q4_0": 4.5, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q8_0": 8.5, "mxfp4": 4.25}
    for name, bits in {**stored_bits, "Q2_K": 3.125, "Q3_K": 3.5, "IQ4_NL": 4.5, "IQ4_XS": 4.25}.items():
        layout = PackedLayout(format_of(name, 2048), 2048)
        stored = bits / 8 * 2048 * PANEL
        assert stored <= layout.panel_bytes <= 1.03 * stored


def test_nan_of_e4m3_marks_its_group(code: Code) -> None:
    kind = QuantFormat("fp8", 8, 32, values="e4m3", scale="float32")
    layout = PackedLayout(kind, 64)
    codes = torch.zeros(32, 64, dtype=torch.uint8)
    codes[3, 40] = 0xFF
    packed = new_packed(32, layout)
    QuantPanelWriter(code, layout).write(packed, 0, QuantBlock(codes, torch.ones(32, 2)))
    scales = packed.view(2, -1)[:, : PANEL * 4].contiguous().view(torch.float32)
    assert torch.equal(scales.isnan().nonzero(), torch.tensor([[1, 3]]))


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        (QuantFormat("by 48", 4, 48), 96),
        (QuantFormat("does not divide", 4, 64), 96),
        (QuantFormat("groups of 64 in super groups", 4, 64, super_group=256), 512),
        (QuantFormat("half a super group", 4, 32, super_group=256), 384),
        (QuantFormat("minimums in e8m0", 4, 32, scale="e8m0", offsets="minimum"), 64),
        (QuantFormat("zero points of 6 bits", 6, 32, offsets="zero_point"), 64),
        (QuantFormat("e4m3 with zero points", 8, 32, values="e4m3", offsets="zero_point"), 64),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_unsupported(kind: QuantFormat, columns: int) -> None:
    assert not is_supported(kind, columns)
