"""The weights of experts by address: the first expert's linear stands for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from executor_svc.cpu.kernels.quantized.files.panels import FilePanels
from executor_svc.cpu.kernels.quantized.launches import PackedWeightPart, Part
from executor_svc.plan.arrays import IntArray


@runtime_checkable
class StoredExpert(Protocol):
    """A linear whose weight is in parts."""

    in_features: int
    out_features: int
    bias: Tensor | None

    @property
    def parts(self) -> Sequence[Part]: ...


class ExpertWeights:
    """The linears of experts, of one shape and the same formats."""

    def __init__(self, linears: Sequence[StoredExpert]) -> None:
        """Raises ValueError for linears that are not alike."""
        _align_orders(linears)
        self._linears = list(linears)
        self._tables: dict[int, IntArray] = {}
        first = linears[0]
        for each in linears:
            if _kind(each) != _kind(first):
                raise ValueError("the experts of a layer differ in shape or format")

    @property
    def first(self) -> StoredExpert:
        """The first expert's linear."""
        return self._linears[0]

    def file_at(self, value: int) -> tuple[FilePanels, int] | None:
        """Return how panels of the first expert's weight at an address are made, and the address of its scales or 0.

        None: the panels are there.
        """
        for part in self.first.parts:
            if part.file is not None and weight_of(part).data_ptr() == value:
                scales = part.file_scales if isinstance(part, PackedWeightPart) else None
                return part.file, 0 if scales is None else scales.data_ptr()
        return None

    def table(self, value: int) -> int:
        """Return the address of a table [E] int64 of what an argument is for each expert; 0: the same for all.

        value: an argument of the first expert's launches.
        """
        if value not in self._tables:
            for places in zip(*(_places(each) for each in self._linears), strict=True):
                start, size = places[0]
                if size and start <= value < start + size:
                    self._tables[value] = np.array([place + value - start for place, _ in places], np.int64)
        found = self._tables.get(value)
        return 0 if found is None else int(found.ctypes.data)


def _align_orders(linears: Sequence[StoredExpert]) -> None:
    """Give parts whose columns are in order an order, too, where those of other experts have one (GPTQ's act-order)."""
    for place in range(min(len(each.parts) for each in linears)):
        parts = [each.parts[place] for each in linears]
        if all(isinstance(part, PackedWeightPart) and part.order is None for part in parts):
            continue
        for each, part in zip(linears, parts, strict=True):
            if isinstance(part, PackedWeightPart) and part.order is None and isinstance(each.parts, list):
                each.parts[place] = replace(part, order=torch.arange(part.layout.columns))


def _kind(linear: StoredExpert) -> tuple[object, ...]:
    parts = [
        (part.layout, part.rows, part.int8, part.order is None, part.file)
        if isinstance(part, PackedWeightPart)
        else (part.panels.shape, part.rows, part.file)
        for part in linear.parts
    ]
    return linear.in_features, linear.out_features, linear.bias is None, tuple(parts)


def weight_of(part: Part) -> Tensor:
    """Return the weight of a part."""
    return part.packed if isinstance(part, PackedWeightPart) else part.panels


def _places(linear: StoredExpert) -> list[tuple[int, int]]:
    """Return the address and bytes of each part, of its scales in a file and its order of columns, and of the bias."""
    tensors = [weight_of(part) for part in linear.parts]
    packed = [part for part in linear.parts if isinstance(part, PackedWeightPart)]
    tensors += [part.file_scales for part in packed if part.file_scales is not None]
    beside = [torch.empty(0) if each is None else each for each in (*(part.order for part in packed), linear.bias)]
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in (*tensors, *beside)]
