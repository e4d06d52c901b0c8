"""Weights in few bits in a GPU's memory: planes of codes and of the numbers of groups, arranged when they are read.

A step is the columns that a product unpacks at a time: 128, or 64 where 128 does not divide the columns. A half is half
of a step. Rows of the weight are in tiles of 64; rows and columns are filled up with zeros. Planes, for T tiles and S
steps, each with its 64 rows side by side:

- codes of 4 bits, or the low 4 bits of 5 and 6: [T, S, 64, HALF] bytes. Byte j of a step has column j in its low bits,
  column HALF + j in its high ones: the halves are multiplied one after the other, and no number changes its thread.
- codes of 8 bits: [T, 2 S, 64, HALF] bytes.
- codes of 2 and 3 bits are stored as those of 4 bits, and the integers of a table as codes of 8 bits (`stored_as`).
- high, of codes of 5 and 6 bits: [T, S, 64, B] bytes, B = step * (bits - 4) / 8. Column c is in byte c % B, from bit
  (bits - 4) * (c // B) on.
- numbers: [T, spans, 64, groups in a half, 2 halves, tables]: scales, and with a second table minimums. One pair of
  halves is a span; where a group is a step or more, a span is a group: [T, spans, 64, tables].
- zeros: zero points in bytes, likewise. Of groups of 128 and more they are the second table of numbers, as floats.
- above: [T, super spans, 64, tables]: super scales, super minimums.

Numbers have the format's type; those of groups of 128 and more, and super scales, are float32 where there is one table:
pieces of 4 bytes or more can be copied to shared memory ahead of their use.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.device.dequantize import scales_marking_nan
from executor_svc.device.stored_linear import QuantBlock, QuantFormat

TILE = 64
"""Rows of the weight."""
_WIDE_GROUP = 128
_BYTE_ZERO = 128
_ONE_SPAN = 1 << 30
"""Steps of a span where a row has one."""
PLANES = ("codes", "high", "numbers", "zeros", "above")
"""In the order of the kernels' arguments."""
_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "e8m0": torch.uint8}
_TRITON = {
    torch.uint8: "u8", torch.int8: "i8", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FewBitsLayout:
    """Sizes of the planes of a weight of one format with so many columns."""

    kind: QuantFormat
    columns: int

    @property
    def half(self) -> int:
        """Columns of half a step."""
        return 64 if self.columns % 128 == 0 else 32

    @property
    def steps(self) -> int:
        return -(-self.columns // (2 * self.half))

    @property
    def whole_row(self) -> bool:
        """Whether a row has one scale."""
        return self.kind.group == self.columns

    @property
    def group(self) -> int:
        """Columns that share a number here: those of the format, or 32 where a step would cut through groups."""
        group, step = self.kind.group, 2 * self.half
        return group if self.whole_row or group % step == 0 or step % group == 0 else 32

    @property
    def groups(self) -> int:
        """Groups of a step, 1 where a group is a step or more."""
        return 1 if self.whole_row else max(1, 2 * self.half // self.group)

    @property
    def span(self) -> int:
        """Steps that share numbers."""
        return _ONE_SPAN if self.whole_row else max(1, self.group // (2 * self.half))

    @property
    def super_span(self) -> int:
        """Steps that share super scales; 1 without super groups."""
        return 1 if self.kind.super_group is None else self.kind.super_group // (2 * self.half)

    @property
    def paired(self) -> bool:
        """Whether numbers have two tables."""
        wide = self.whole_row or self.group >= _WIDE_GROUP
        return self.kind.offsets == "minimum" or (self.kind.offsets == "zero_point" and wide)

    @property
    def high_bytes(self) -> int:
        """Bytes of a step and row with the bits of codes above the fourth; 0 for codes of 4 and 8 bits."""
        return 2 * self.half * (self.kind.bits - 4) // 8 if self.kind.bits in (5, 6) else 0

    def plane_shapes(self, rows: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each plane of a weight with so many rows, by name."""
        kind, tiles, tables = self.kind, -(-rows // TILE), 2 if self.paired else 1
        dtype, spans, supers = _TYPES[kind.scale], self._spans(self.span), kind.super_group is not None
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        shapes["codes"] = torch.uint8, (tiles, (2 if kind.bits == 8 else 1) * self.steps, TILE, self.half)
        if self.high_bytes:
            shapes["high"] = torch.uint8, (tiles, self.steps, TILE, self.high_bytes)
        alone = torch.float32 if not self.paired and kind.scale != "e8m0" else dtype
        wide = self.whole_row or self.group >= _WIDE_GROUP
        below = torch.int8 if supers else alone if wide else dtype
        shapes["numbers"] = below, (tiles, spans, TILE, self.groups * tables)
        if kind.offsets == "zero_point" and not self.paired:
            shapes["zeros"] = torch.uint8, (tiles, spans, TILE, self.groups)
        if supers:
            shapes["above"] = alone, (tiles, self._spans(self.super_span), TILE, tables)
        return shapes

    def _spans(self, span: int) -> int:
        return -(-self.steps // span)

    def constants(self) -> dict[str, Any]:
        """Return what kernels are compiled for."""
        kind = self.kind
        return {
            "BITS": kind.bits,
            "VALUES": kind.values,
            "ZERO": kind.zero,
            "OFFSETS": kind.offsets,
            "PAIRED": self.paired,
            "SUPERS": kind.super_group is not None,
            "GROUPS": self.groups,
            "HALF": self.half,
            "TILE": TILE,
        }


def is_supported(kind: QuantFormat, columns: int) -> bool:
    """Return whether this layout, and the kernels on it, have the format."""
    group, supers = kind.group, kind.super_group
    if columns % group or (group != 16 and group % 32 and group != columns):
        return False
    if supers is not None and (supers % 128 or columns % supers or group > 64 or kind.offsets == "zero_point"):
        return False
    if kind.scale == "e8m0" and (supers is not None or kind.offsets == "minimum"):
        return False
    if kind.values == "integer":
        return True
    return kind.offsets == "none" and kind.bits == (8 if kind.values == "e4m3" else 4)


def stored_as(kind: QuantFormat) -> QuantFormat:
    """Return the format with the same numbers that the planes have."""
    if kind.values == "table":
        return replace(kind, bits=8, values="integer", zero=_BYTE_ZERO, table=())
    return replace(kind, bits=4) if kind.bits < 4 else kind


class FewBitsWeight:
    """A weight [rows, columns] in its planes."""

    def __init__(self, kind: QuantFormat, rows: int, columns: int, device: torch.device) -> None:
        """Reserve memory; `write` fills it with blocks of the format `kind`."""
        self.rows, self.columns = rows, columns
        self.layout = FewBitsLayout(stored_as(kind), columns)
        table = torch.tensor(kind.table, device=device) + _BYTE_ZERO
        self._table = table.to(torch.uint8) if kind.table else None
        shapes = self.layout.plane_shapes(rows)
        self._device = device
        self._planes = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()}
        self.num_experts: int | None = None
        """Of `together`; None: it is one weight."""

    @classmethod
    def together(cls, weights: Sequence[FewBitsWeight]) -> FewBitsWeight:
        """Return the weights of experts, of one layout and as many rows each: their tiles one after the other."""
        found = copy(weights[0])
        found.num_experts = len(weights)
        found._planes = {name: torch.cat([each._planes[name] for each in weights]) for name in weights[0]._planes}
        return found

    def of_expert(self, index: int) -> FewBitsWeight:
        """Return the weight of one of `together`, in the same memory."""
        found, tiles = copy(self), -(-self.rows // TILE)
        found.num_experts = None
        found._planes = {name: plane[index * tiles : (index + 1) * tiles] for name, plane in self._planes.items()}
        return found

    @property
    def num_bytes(self) -> int:
        """Of all planes, with what they are filled up with."""
        return sum(plane.nbytes for plane in self._planes.values())

    @property
    def planes(self) -> tuple[Tensor | None, ...]:
        """Return codes, high, numbers, zeros and above; None: the format has no such plane."""
        return tuple(self._planes.get(name) for name in PLANES)

    def write(self, first: int, block: QuantBlock) -> None:
        """Write consecutive rows, from row `first` on."""
        row = torch.arange(first, first + len(block), device=self._device)
        for name, packed in self._packed(block).items():
            plane = self._planes[name]
            plane[row // TILE, :, row % TILE] = packed.view(len(block), plane.shape[1], plane.shape[3])

    def _packed(self, block: QuantBlock) -> dict[str, Tensor]:
        """Return a block's rows of each plane."""
        layout, kind = self.layout, self.layout.kind
        codes = block.codes.to(self._device)
        codes = codes if self._table is None else self._table[codes.int()]
        codes = functional.pad(codes, (0, 2 * layout.half * layout.steps - self.columns))
        found = {"codes": packed_codes(codes, layout)}
        if layout.high_bytes:
            found["high"] = packed_high_bits(codes, layout)
        offsets = {"none": None, "minimum": block.minimums, "zero_point": block.zero_points}[kind.offsets]
        if "zeros" in self._planes:
            found["zeros"] = self._tables("zeros", [offsets])
            offsets = None
        found["numbers"] = self._tables("numbers", [scales_marking_nan(block, kind), offsets])
        if kind.super_group is not None:
            found["above"] = self._tables("above", [block.super_scales, block.super_minimums])
        return found

    def _tables(self, name: str, tables: list[Tensor | None]) -> Tensor:
        """Return tables of numbers [R, G] in the order of a plane: [R, spans, groups in a half, halves, tables]."""
        plane, found = self._planes[name], []
        present = [table.to(self._device).to(plane.dtype) for table in tables if table is not None]
        spans, groups = plane.shape[1], plane.shape[3] // len(present)
        for table in present:
            if name != "above" and not self.layout.whole_row:
                table = table.repeat_interleave(self.layout.kind.group // self.layout.group, dim=1)
            table = functional.pad(table, (0, spans * groups - table.shape[1]))
            halves = 2 if groups > 1 else 1
            found.append(table.view(len(table), spans, halves, groups // halves).transpose(2, 3))
        return torch.stack(found, dim=-1).flatten(1)


def plane_arguments(layout: FewBitsLayout) -> tuple[dict[str, str], dict[str, int | None]]:
    """Return Triton's types of a format's planes, and what its launches make constant: for variants."""
    shapes = layout.plane_shapes(TILE)
    present = {name: f"*{_TRITON[shapes[name][0]]}" for name in PLANES if name in shapes}
    absent: dict[str, int | None] = {name: None for name in PLANES if name not in shapes}
    ones = {name: 1 for name, size in (("span", layout.span), ("super_span", layout.super_span)) if size == 1}
    return present, absent | ones


def packed_codes(codes: Tensor, layout: FewBitsLayout) -> Tensor:
    """Return the bytes of codes [R, steps * 2 HALF] uint8, without the bits above the fourth of 5 and 6."""
    if layout.kind.bits == 8:
        return codes
    low, high = (codes & 0x0F).view(len(codes), layout.steps, 2, layout.half).unbind(2)
    return low | high << 4


def packed_high_bits(codes: Tensor, layout: FewBitsLayout) -> Tensor:
    """Return the bytes [R, steps, B] of the bits above the fourth of codes [R, steps * 2 HALF] uint8."""
    width = layout.kind.bits - 4
    places = (codes >> 4).view(len(codes), layout.steps, 8 // width, layout.high_bytes)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return (places << shifts[:, None]).sum(2, dtype=torch.uint8)
