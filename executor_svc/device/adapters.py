"""The operations of LoRA adapters on a device (Hu et al., 2021).

An *adapter place* holds one adapter; each linear has the same number of places. An adapter is packed once, by any
thread, into memory in the device's order, and then set in a place between steps. A step says which place each of its
rows uses. `device.reference.add_adapters` defines the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from executor_svc.device.kernels import Kernels
from executor_svc.plan.arrays import IntArray

NO_PLACE = -1
"""The adapter place of a row without an adapter."""


class AdapterPart(Protocol):
    """Two matrices that add scale * ((x @ a.T) @ b.T) to some columns of a linear's result."""

    @property
    def a(self) -> Tensor:
        """[r, in_features], on the CPU, in any floating-point dtype."""
        ...

    @property
    def b(self) -> Tensor:
        """[columns, r]"""
        ...

    @property
    def scale(self) -> float: ...

    @property
    def first_row(self) -> int:
        """The first of its columns of the result, which is a row of the linear's weight."""
        ...


class EmbeddingPair(Protocol):
    """Two matrices that add scale * (a[token] @ b.T) to a token's row of a table of embeddings."""

    @property
    def a(self) -> Tensor:
        """[vocabulary, r], as those of `AdapterPart`."""
        ...

    @property
    def b(self) -> Tensor:
        """[hidden, r]"""
        ...

    @property
    def scale(self) -> float: ...


class ReplacedRows(Protocol):
    """Rows in place of those of a table of embeddings, or of a linear's weight."""

    @property
    def token_ids(self) -> Tensor:
        """[n] int64, ascending: which rows."""
        ...

    @property
    def rows(self) -> Tensor:
        """[n, in_features], on the CPU."""
        ...


class PackedPart(Protocol):
    """What one linear or table needs of an adapter, in memory that lives as long as this."""

    @property
    def memory(self) -> Tensor: ...


class AdapterPlaces(Protocol):
    """What the adapters in all places add to one linear."""

    def bytes_of_rank(self, rank: int) -> int:
        """Return the memory of an adapter with a pair of this rank for each part."""
        ...

    def packed_bytes(self, parts: Sequence[AdapterPart], replaced: ReplacedRows | None = None) -> int:
        """Return the memory that `pack` needs, a multiple of 64; raises ValueError as it does."""
        ...

    def pack(self, parts: Sequence[AdapterPart], replaced: ReplacedRows | None, memory: Tensor) -> PackedPart:
        """Put an adapter's parts, rounded to the model's dtype, into memory [packed_bytes] uint8; any thread may.

        What the parts add comes on top of replaced rows. Raises ValueError for parts that do not fit: too many, of too
        large a rank, or of another shape, and for replaced rows of a linear that was made without.
        """
        ...

    def set(self, place: int, packed: PackedPart | None) -> None:
        """Put a packed adapter into a place, None: nothing; no step may run. Raises ValueError for a wrong place."""
        ...


class EmbeddingPlaces(Protocol):
    """What the adapters in all places add to a table of embeddings."""

    def bytes_of_rank(self, vocabulary: int, rank: int) -> int:
        """Return the memory of an adapter with a pair of this rank for a table of so many rows."""
        ...

    def packed_bytes(self, pair: EmbeddingPair | None, replaced: ReplacedRows | None = None) -> int:
        """As in `AdapterPlaces`."""
        ...

    def pack(self, pair: EmbeddingPair | None, replaced: ReplacedRows | None, memory: Tensor) -> PackedPart:
        """As in `AdapterPlaces`."""
        ...

    def set(self, place: int, packed: PackedPart | None) -> None:
        """As in `AdapterPlaces`."""
        ...


class AdapterRows(Protocol):
    """The rows of a step that have adapters, sorted by place."""

    name: str
    """The name of its number of tiles in `Program.run`."""

    num_tiles: int
    """Tiles of a few rows of one place in the current step; 0: no row has an adapter."""

    def fill(self, places: IntArray) -> None:
        """Set the adapter place of each row [T], NO_PLACE for none; T is at most the number it was made for."""
        ...


@runtime_checkable
class AdapterKernels(Kernels, Protocol):
    """The operations of a device that runs adapters."""

    def new_adapter_memory(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 on the CPU, all zeros, for packed adapters."""
        ...

    def new_adapter_rows(self, max_rows: int) -> AdapterRows:
        """Return the table of steps of at most max_rows rows."""
        ...

    def new_adapter_places(
        self,
        num_places: int,
        max_rank: int,
        in_features: int,
        part_columns: Sequence[int],
        dtype: torch.dtype,
        replaces_rows: bool = False,
    ) -> AdapterPlaces:
        """Return empty places of a linear whose result has parts of so many columns, each with its own adapter pair.

        max_rank: of each part; replaces_rows: whether adapters may replace rows of the weight.
        """
        ...

    def new_embedding_places(
        self, num_places: int, max_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> EmbeddingPlaces:
        """Return empty places of a table of embeddings."""
        ...

    def add_adapters(self, x: Tensor, y: Tensor, places: AdapterPlaces, rows: AdapterRows) -> Tensor:
        """Add to y [T, out_features] what the rows' adapters make of x [T, in_features], in place; return y.

        First, columns whose rows of the weight an adapter replaces become the product of x and these.

        y is in the dtype of x, or float32 that holds numbers of that dtype. The sums are in fp32 and in one order, the
        result is rounded once to the dtype of x. A row's bits depend on nothing but its x, its y and its adapter; a row
        without an adapter stays as it is. Parts of places that hold nothing add nothing.
        """
        ...

    def add_embedding_adapters(
        self, token_ids: Tensor, y: Tensor, places: EmbeddingPlaces, rows: AdapterRows
    ) -> Tensor:
        """Replace rows of y [T, hidden] by those of the rows' adapters and add their pairs, as `add_adapters`.

        token_ids: [T] int64.
        """
        ...

    def scale_rows(self, x: Tensor, scale: float) -> Tensor:
        """Multiply x [T, columns] by a number in place, rounded to its dtype; return x."""
        ...
