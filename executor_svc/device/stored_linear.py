"""Weights of linears in few bits, as checkpoints store them: formats, planes of numbers, parts of fused projections.

A weight [N, K] has a code of a few bits for each number, and numbers that a group of consecutive columns of a row
shares. In float32, each operation rounded:

    weight[n, k] = value(code[n, k]) * scale[n, g] + minimum[n, g]          g = k // group

`device.dequantize` is this in PyTorch. Readers of files yield blocks of rows with one code in a byte; a device packs
them as its kernels like them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from executor_svc.device.kernels import WeightRows

CodeValues = Literal["integer", "table", "e2m1", "e4m3"]
Offsets = Literal["none", "minimum", "zero_point"]
ScaleType = Literal["float16", "bfloat16", "float32", "e8m0"]

_NOTABLE = 1.1
"""By how much more memory than its file a weight takes, for the log to say so."""
_SCALE_BYTES: dict[ScaleType, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "e8m0": 1}
Form = Literal["dense", "weights alone", "int8", "int8 whole row"]
"""How a weight is multiplied: dequantized at the start; unpacked in the product; with activations in int8, a
scale for each 32 of them or for a row."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How the numbers of a weight are stored. Kernels are made for each; equal formats share them."""

    name: str = field(compare=False)
    """As its file calls it, such as Q4_K: for messages."""
    bits: Literal[2, 3, 4, 5, 6, 8]
    """Of a code."""
    group: int
    """Columns that share a scale: 16, 32, a larger multiple of 32 that divides K, or K (a scale per row)."""
    values: CodeValues = "integer"
    """integer: code - zero, or code - zero_point[n, g]; table: the integer at place `code` of `table`; e2m1, e4m3: the
    float of that format with these bits."""
    zero: int = 0
    """Of integers without zero points; 128 where int8 numbers are stored as code = number + 128."""
    scale: ScaleType = "float16"
    """Of scales and minimums; with a super_group, of the super scales."""
    super_group: int | None = None
    """Columns that share a super scale, a multiple of group: scale = super_scale * sub_scale, minimum likewise."""
    offsets: Offsets = "none"
    table: tuple[int, ...] = ()
    """16 integers from -128 to 127, for codes of 4 bits."""
    file_bits: float | None = field(default=None, compare=False)
    """Of a number in its file; None: as many as here."""

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of a weight [N, K] in this format: codes, scales and offsets, without padding."""
        rows, columns = shape
        groups = rows * (columns // self.group)
        wide, tables = _SCALE_BYTES[self.scale], 2 if self.offsets == "minimum" else 1
        if self.super_group is None:
            shared = tables * groups * wide
        else:
            shared = tables * (groups + rows * (columns // self.super_group) * wide)
        return rows * columns * self.bits // 8 + shared + (groups if self.offsets == "zero_point" else 0)


@dataclass(frozen=True, slots=True)
class QuantBlock:
    """Consecutive rows of a weight, on the CPU. G: groups of a row, S: super groups of a row."""

    codes: Tensor
    """[R, K] uint8, each below 2**bits."""
    scales: Tensor
    """[R, G] of the format's scale type (e8m0: uint8, an exponent with bias 127); with super_scales int8 sub scales."""
    super_scales: Tensor | None = None
    """[R, S]"""
    minimums: Tensor | None = None
    """[R, G], of the dtype of scales: added, so those of formats that subtract have a negative super minimum."""
    super_minimums: Tensor | None = None
    """[R, S]"""
    zero_points: Tensor | None = None
    """[R, G] uint8"""

    def __len__(self) -> int:
        return len(self.codes)


@runtime_checkable
class QuantRows(Protocol):
    """The weight of a linear in few bits, or a part of its rows, read when a device needs it; read once."""

    shape: tuple[int, int]
    """[out_features, in_features]"""
    format: QuantFormat
    column_order: Tensor | None
    """[K] int64: stored column j multiplies x[column_order[j]] (actorder); None: in order."""
    whole_row_activations: bool
    """The checkpoint was made for int8 activations with one scale per row (W8A8); else groups of 32 have a scale."""

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """Yield consecutive rows, some num_bytes of codes at a time, in multiples of `multiple` where that can be.

        A block is valid until the next one. Raises LoaderError if a file cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """The weight of a linear made of parts, one below the other; each in its own format, or dense."""

    parts: Sequence[QuantRows | WeightRows]
    dtype: torch.dtype
    """Of the model: rows of x, the result, and dense parts have it."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]"""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


class FewBits:
    """The formats of the prepared weights in few bits, and the form of each; filled by the device."""

    def __init__(self) -> None:
        self._forms: dict[tuple[QuantFormat, Form], dict[str, str]] = {}
        """The names of equal formats, and what the log calls them."""
        self.saved_bytes = 0
        """Bytes that the weights take less than in the model's dtype."""
        self.ways: tuple[str, ...] = ()
        """How the start has chosen to multiply them, a line for each shape; part of the numerics fingerprint."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Every format and form; empty for a model of dense weights. Part of the numerics fingerprint."""
        return tuple(sorted(f"{_facts(kind)}: {form}" for kind, form in self._forms))

    @property
    def summary(self) -> str:
        """The forms by the formats' names, for the log."""
        return ", ".join(
            sorted({f"{text}: {form}" for (_, form), each in self._forms.items() for text in each.values()})
        )

    def described(self, dtype: str) -> str:
        """What the weights of a model of this dtype are in, as "Q4_1 with 8-bit activations"; empty: all in dtype."""
        names: dict[str, set[str]] = {}
        for (_, form), found in self._forms.items():
            names.setdefault(_SHOWN[form] or f"with {dtype} activations", set()).update(found)
        return "; ".join(f"{', '.join(sorted(each))} {how}" for how, each in sorted(names.items()))

    def add(self, part: QuantRows, dtype: torch.dtype, form: Form, num_bytes: int) -> None:
        """Note a weight of a model of this dtype that takes so many bytes."""
        numbers, name, stored = part.shape[0] * part.shape[1], part.format.name, part.format.file_bits
        bits, text = 8 * num_bytes / numbers, name
        if stored is not None and bits > _NOTABLE * stored:
            text = f"{name} ({stored:.1f} bits a number in the file, {bits:.1f} here)"
        self._forms.setdefault((part.format, form), {}).setdefault(name, text)
        self.saved_bytes += numbers * dtype.itemsize - num_bytes

    def add_dense(self, part: QuantRows) -> None:
        """Note a weight that is held in the model's dtype."""
        self._forms.setdefault((part.format, "dense"), {})[part.format.name] = part.format.name


_SHOWN: dict[Form, str] = {
    "dense": "dequantized", "weights alone": "", "int8": "with 8-bit activations",
    "int8 whole row": "with 8-bit activations",
}  # fmt: skip
"""How a form multiplies, for people; empty: with activations as they are."""


def _facts(kind: QuantFormat) -> str:
    """Return everything of a format that the numbers depend on, without its name."""
    scales = f"{kind.scale} scales by {kind.group} and {kind.super_group}"
    values = f"{kind.values} {kind.table}" if kind.table else kind.values
    return f"{kind.bits} bits, {values}, zero {kind.zero}, {scales}, {kind.offsets}"
