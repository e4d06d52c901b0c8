"""Readers of weights that lie in columns [K, N], packed in int32 words, as GPTQ and AWQ checkpoints store them.

A packed weight is read as a whole: rows of the result are columns of its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows
from executor_svc.models.quantized.rows import LazyRows, in_order, row_ranges, sorted_columns, unpack_words
from executor_svc.models.quantized.tensors import (
    SCALE_TYPES,
    CheckpointTensors,
    check_columns,
    check_group,
    check_scales,
    checked,
)

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 consecutive numbers each 4 bits of a word hold, the lowest first (AutoAWQ 0.2.9, awq/modules/linear)."""


@dataclass(frozen=True, slots=True)
class GptqKind:
    """How a linear of a GPTQ checkpoint is stored."""

    bits: Literal[4, 8]
    group: int | None
    """Columns that share a scale; None: all."""
    symmetric: bool
    """All zero points are expected to be the middle of the codes."""
    zeros_minus_one: bool
    """Version 1 of the format: stored zero points are 1 too low."""


def open_gptq(tensors: CheckpointTensors, prefix: str, shape: tuple[int, int], kind: GptqKind) -> QuantRows:
    """Return the weight of a linear: qweight [K * bits / 32, N], qzeros [G, N * bits / 32], scales [G, N], g_idx [K].

    Raises LoaderError.
    """
    (rows, columns), name = shape, f"{prefix}.qweight"
    group, per_word = kind.group or columns, 32 // kind.bits
    check_group(name, group, columns)
    check_columns(name, columns, per_word)
    check_columns(f"{prefix}.qzeros", rows, per_word)
    checked(tensors, name, [(columns // per_word, rows)], [torch.int32])
    scale = _checked_scales(tensors, prefix, shape, group)
    zeros = _GptqZeros(tensors, f"{prefix}.qzeros", shape, group, kind)
    order = None
    if tensors.find(f"{prefix}.g_idx") is not None:
        order = sorted_columns(tensors, f"{prefix}.g_idx", columns, group)

    def codes(words: Tensor, part: slice) -> Tensor:
        return in_order(unpack_words(words[:, part].t(), kind.bits), order)

    return LazyRows(
        shape,
        QuantFormat(
            name=f"GPTQ {kind.bits} bits",
            bits=kind.bits,
            group=group,
            zero=0 if zeros.vary else zeros.middle,
            scale=SCALE_TYPES[scale],
            offsets="zero_point" if zeros.vary else "none",
        ),
        _reader(tensors, prefix, shape, codes, zeros.table),
        column_order=order,
    )


class _GptqZeros:
    """The zero points of a linear. Those of a symmetric one are read at once, to see that all are the middle."""

    def __init__(
        self, tensors: CheckpointTensors, name: str, shape: tuple[int, int], group: int, kind: GptqKind
    ) -> None:
        self._tensors = tensors
        self._name = name
        self._kind = kind
        self.middle: int = 1 << (kind.bits - 1)
        checked(tensors, name, [(shape[1] // group, shape[0] * kind.bits // 32)], [torch.int32])
        self._words = tensors.raw(name) if kind.symmetric else None
        self.vary = True
        if self._words is not None:
            self.vary = not bool((self._codes(self._words) == self.middle).all())
            if not self.vary:
                self._words = None

    def _codes(self, words: Tensor) -> Tensor:
        """Return [G, N] uint8."""
        stored = unpack_words(words, self._kind.bits)
        if not self._kind.zeros_minus_one:
            return stored
        # As AutoGPTQ 0.7.1 does: the sum wraps around.
        return (stored + 1) & ((1 << self._kind.bits) - 1)

    def table(self) -> Tensor | None:
        """Return the zero points [G, N] uint8, None if all are the middle."""
        if not self.vary:
            return None
        return self._codes(self._tensors.raw(self._name) if self._words is None else self._words)


def open_awq(tensors: CheckpointTensors, prefix: str, shape: tuple[int, int], group: int | None) -> QuantRows:
    """Return the weight of a linear: qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]; 4 bits, the gemm version.

    group: columns that share a scale; None: all. Raises LoaderError.
    """
    (rows, columns), name = shape, f"{prefix}.qweight"
    group = group or columns
    check_group(name, group, columns)
    check_columns(name, rows, 8)
    checked(tensors, name, [(columns, rows // 8)], [torch.int32])
    checked(tensors, f"{prefix}.qzeros", [(columns // group, rows // 8)], [torch.int32])
    scale = _checked_scales(tensors, prefix, shape, group)

    def codes(words: Tensor, part: slice) -> Tensor:
        return _awq_codes(words[:, part.start // 8 : part.stop // 8])

    def zeros() -> Tensor:
        return _awq_codes(tensors.raw(f"{prefix}.qzeros")).t()

    kind = QuantFormat(name="AWQ", bits=4, group=group, scale=SCALE_TYPES[scale], offsets="zero_point")
    return LazyRows(shape, kind, _reader(tensors, prefix, shape, codes, zeros), row_unit=8)


def _awq_codes(words: Tensor) -> Tensor:
    """Return the codes of words [K, N / 8] as [N, K] uint8."""
    columns, eights = words.shape
    packed = words.t().flatten().contiguous().view(torch.uint8).reshape(eights, columns, 4)
    codes = torch.empty(eights, 8, columns, dtype=torch.uint8)
    for byte in range(4):
        low, high = _AWQ_ORDER[2 * byte : 2 * byte + 2]
        torch.bitwise_and(packed[:, :, byte], 15, out=codes[:, low])
        torch.bitwise_right_shift(packed[:, :, byte], 4, out=codes[:, high])
    return codes.flatten(0, 1)


def _checked_scales(tensors: CheckpointTensors, prefix: str, shape: tuple[int, int], group: int) -> torch.dtype:
    """Check the scales [G, N] of a linear; return their dtype."""
    stored = checked(tensors, f"{prefix}.scales", [(shape[1] // group, shape[0])], list(SCALE_TYPES))
    assert stored.dtype is not None
    return stored.dtype


def _reader(
    tensors: CheckpointTensors,
    prefix: str,
    shape: tuple[int, int],
    codes: Callable[[Tensor, slice], Tensor],
    zeros: Callable[[], Tensor | None],
) -> Callable[[int], Iterator[QuantBlock]]:
    """Return the reader of a weight; codes: of a range of rows, from all words; zeros: [G, N] or None."""

    def read(rows: int) -> Iterator[QuantBlock]:
        words = tensors.raw(f"{prefix}.qweight", elements=shape[0] * shape[1])
        scales, table = tensors.raw(f"{prefix}.scales"), zeros()
        check_scales(f"{prefix}.scales", scales)
        for part in row_ranges(shape[0], rows):
            yield QuantBlock(
                codes(words, part),
                scales[:, part].t().contiguous(),
                zero_points=None if table is None else table[:, part].t().contiguous(),
            )

    return read
