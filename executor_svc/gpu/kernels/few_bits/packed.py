"""Weights in few bits in a GPU's memory: planes of bytes, row after row, in the order of the checkpoint's columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows

_BLOCK_BYTES = 1 << 22
"""Of codes that are in memory beside the packed weight."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] of one format; G: groups of a row, S: super groups of a row. Names as in `QuantBlock`."""

    kind: QuantFormat
    shape: tuple[int, int]
    codes: Tensor
    """uint8 [N, K] of 8 bits; else the low 4 bits, [N, K / 2]: of columns 2j and 2j + 1 in a byte, the first lowest."""
    high: Tensor | None
    """uint8, the bits above 4, the first column lowest: [N, K / 8] of 5 bits, [N, K / 4] of 6."""
    scales: Tensor
    super_scales: Tensor | None
    minimums: Tensor | None
    super_minimums: Tensor | None
    zero_points: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        planes = (getattr(self, field.name) for field in fields(self))
        return sum(plane.nbytes for plane in planes if isinstance(plane, Tensor))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of kernels that say where the planes are and how wide their rows are."""
        kind, columns = self.kind, self.shape[1]
        return {
            "codes": self.codes,
            "high": self.high,
            "scales": self.scales,
            "super_scales": self.super_scales,
            "minimums": self.minimums,
            "super_minimums": self.super_minimums,
            "zero_points": self.zero_points,
            "columns": columns,
            "group": kind.group,
            "super_group": kind.super_group or kind.group,
        }


def is_supported(kind: QuantFormat, columns: int) -> bool:
    """Return whether kernels have the format: rows of 16 bytes' multiples, groups that no tile divides unevenly."""
    whole_row = kind.group == columns
    return columns % _ALIGNMENT == 0 and (whole_row or (kind.group % 16 == 0 and columns % kind.group == 0))


def granule(kind: QuantFormat, columns: int, inner: int) -> int:
    """Return how many columns of a tile of `inner` columns have one scale, at most; tiles begin at its multiples."""
    return inner if kind.group == columns else math.gcd(kind.group, inner)


def pack(parts: Sequence[QuantRows], device: torch.device) -> PackedWeight:
    """Read weights of one format, one below the other, and put them into a device's memory.

    Raises LoaderError if a file cannot be read.
    """
    kind, columns = parts[0].format, parts[0].shape[1]
    rows, first = sum(part.shape[0] for part in parts), 0
    planes: dict[str, Tensor] = {}
    for part in parts:
        for block in part.blocks(_BLOCK_BYTES, 1):
            for name, numbers in _planes(block, kind).items():
                if name not in planes:
                    planes[name] = torch.empty(rows, numbers.shape[1], dtype=numbers.dtype, device=device)
                planes[name][first : first + len(block)] = numbers
            first += len(block)
    return PackedWeight(kind, (rows, columns), planes.pop("codes"), planes.pop("high", None), **_numbers(planes))


def _numbers(planes: dict[str, Tensor]) -> dict[str, Any]:
    """Return the planes of numbers of groups by name, None for those that the format lacks."""
    names = ("scales", "super_scales", "minimums", "super_minimums", "zero_points")
    return {name: planes.get(name) for name in names}


def _planes(block: QuantBlock, kind: QuantFormat) -> dict[str, Tensor]:
    """Return the planes of a block by their names."""
    planes = {field.name: getattr(block, field.name) for field in fields(QuantBlock)}
    if kind.bits < 8:
        low = block.codes & 15
        planes["codes"] = low[:, 0::2] | low[:, 1::2] << 4
    if kind.bits in (5, 6):
        planes["high"] = _joined(block.codes >> 4, kind.bits - 4)
    return {name: numbers for name, numbers in planes.items() if numbers is not None}


def _joined(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers [R, K] of 1 or 2 bits as bytes, the first lowest."""
    count = 8 // bits
    missing = -numbers.shape[1] % count
    shifts = torch.arange(count, dtype=torch.uint8) * bits
    grouped = functional.pad(numbers, (0, missing)).unflatten(1, (-1, count))
    joined: Tensor = (grouped << shifts).sum(2, dtype=torch.uint8)
    return joined
