"""The operations of LoRA adapters on a device (Hu et al., 2021).

An *adapter place* holds one adapter; each linear has memory for the same number of places, taken at the start. A step
says which place each of its rows uses. `device.reference.add_adapters` defines the operation.
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


class AdapterPlaces(Protocol):
    """What the adapters in all places add to one linear."""

    @property
    def num_bytes(self) -> int:
        """Memory of all places, taken when this was made, and that of replaced rows, taken when they are loaded."""
        ...

    def load(self, place: int, parts: Sequence[AdapterPart], replaced: ReplacedRows | None = None) -> None:
        """Put an adapter's parts into a place, rounded to the model's dtype; any thread may, if no step uses it.

        What the parts add comes on top of replaced rows. Raises ValueError for parts that do not fit: too many, of too
        large a rank, or of another shape, and for replaced rows of a linear that was made without.
        """
        ...

    def clear(self, place: int) -> None:
        """Let a place add nothing; conditions as those of `load`."""
        ...


class EmbeddingPlaces(Protocol):
    """What the adapters in all places add to a table of embeddings."""

    @property
    def num_bytes(self) -> int:
        """Memory of the adapters that are loaded: of this kind it is taken when one is loaded."""
        ...

    def load(self, place: int, pair: EmbeddingPair | None, replaced: ReplacedRows | None = None) -> None:
        """Put an adapter's pair and rows into a place; as `AdapterPlaces.load`."""
        ...

    def clear(self, place: int) -> None: ...


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

        An adapter's parts must each fit one of these; max_rank: of each part; replaces_rows: whether adapters may
        replace rows of the weight.
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
