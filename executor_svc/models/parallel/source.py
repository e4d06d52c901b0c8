"""The tensors of one rank: those of a checkpoint, or this rank's part of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from executor_svc.device.ranks import Share
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.base import StoredWeight, WeightSource
from executor_svc.models.parallel.part import Part
from executor_svc.models.parallel.quant_part import QuantPart
from executor_svc.models.parallel.split import part_of
from executor_svc.models.specs.spec import DecoderSpec


class RankSource:
    """Implements `models.base.WeightSource` for the decoder of `split.spec_of`, over the source of the whole model."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, share: Share) -> None:
        """spec: of the whole model."""
        self._source, self._spec, self._share = source, spec, share

    def open(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """As in `WeightSource`; shape: of this rank's part, of embeddings and head of the whole."""
        prefix, _, kind = name.rpartition(".")
        part = part_of(prefix, self._spec, self._share)
        if part is None or (kind == "bias" and part.of_columns):
            return self._source.open(name, shape)
        return self._open_part(name, _whole_shape(shape, part), part)

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        """As in `WeightSource`; shape as in `open`."""
        part = part_of(prefix, self._spec, self._share)
        if part is None:
            return self._source.open_linear(prefix, shape)
        rows, columns = _whole_shape(shape, part)
        stored = self._source.open_linear(prefix, (rows, columns))
        if isinstance(stored, QuantRows):
            in_memory = QuantPart(prefix, stored, part)
            if not isinstance(self._source, PartSource):
                return in_memory
            return self._source.open_linear_part(prefix, stored, in_memory, part)
        return self._open_part(f"{prefix}.weight", (rows, columns), part, stored)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """As in `WeightSource`; shape as in `open`; in another dtype than the model's it is cut in memory."""
        if dtype is None:
            return self.open(name, shape).whole()
        part = part_of(name, self._spec, self._share)
        if part is None:
            assert part_of(name.rpartition(".")[0], self._spec, self._share) is None
            return self._source.get(name, shape, dtype)
        found = self._source.get(name, (*shape[: part.axis], part.total, *shape[part.axis + 1 :]), dtype)
        return torch.cat([found.narrow(part.axis, each.start, len(each)) for each in part.ranges], part.axis)

    def _open_part(
        self, name: str, shape: tuple[int, ...], part: Part, stored: StoredWeight | None = None
    ) -> StoredWeight:
        if isinstance(self._source, PartSource):
            return self._source.open_part(name, shape, part)
        return StoredPart(stored or self._source.open(name, shape), part)


@runtime_checkable
class PartSource(Protocol):
    """A source that reads parts of tensors, and nothing else of them."""

    def open_part(self, name: str, shape: tuple[int, ...], part: Part) -> StoredWeight:
        """Return some rows or columns of a tensor of this shape, to be read later; errors as those of `open`."""
        ...

    def open_linear_part(self, prefix: str, whole: QuantRows, expected: QuantRows, part: Part) -> QuantRows:
        """Return some rows or columns of a weight in few bits; `expected` where they cannot be read alone.

        whole: from `open_linear`; expected: the part, read with all of the weight and cut in memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Implements `models.base.StoredWeight`: some rows or columns of a tensor, in memory alone."""

    stored: StoredWeight
    part: Part

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape_of(self.stored.shape)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        """As in `StoredWeight`: blocks of `rows` rows, the last perhaps smaller."""
        if self.part.of_columns:
            yield from (self._columns(block) for block in self.stored.blocks(rows))
            return
        held: Tensor | None = None
        for chosen in self._chosen(rows):
            held = chosen.clone() if held is None else torch.cat((held, chosen))
            while len(held) >= rows:
                yield held[:rows]
                held = held[rows:]
        if held is not None and len(held):
            yield held

    def whole(self) -> Tensor:
        """As in `StoredWeight`."""
        whole = self.stored.whole()
        if self.part.of_columns:
            return self._columns(whole)
        return torch.cat([whole[rows.start : rows.stop] for rows in self.part.ranges])

    def _columns(self, block: Tensor) -> Tensor:
        return torch.cat([block[:, columns.start : columns.stop] for columns in self.part.ranges], 1)

    def _chosen(self, rows: int) -> Iterator[Tensor]:
        """Yield this part's rows of each block of the whole."""
        first = 0
        for block in self.stored.blocks(rows):
            for wanted in self.part.ranges:
                start, stop = max(first, wanted.start), min(first + len(block), wanted.stop)
                if start < stop:
                    yield block[start - first : stop - first]
            first += len(block)


def _whole_shape(shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
    rows, *columns = shape
    return (rows, part.total) if part.of_columns else (part.total, *columns)
