"""The places of adapters beside linears and tables of embeddings on a GPU, and packed adapters.

A packed adapter lies in pinned memory of the host. To set it in a place copies the matrices of its linears to the
place's memory on the device, on the stream of the steps; tables by token stay where they are, and steps read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from executor_svc.device.adapters import AdapterPart, EmbeddingPair, PackedPart, ReplacedRows
from executor_svc.gpu.kernels.lora.embedding import (
    EmbeddingMatrices,
    PackedEmbedding,
    add_embedding_lora,
    embedding_workspace_size,
)
from executor_svc.gpu.kernels.lora.lora import add_lora, workspace_size
from executor_svc.gpu.kernels.lora.places import LoraPlaces, LoraShape, PackedPairs, Taker
from executor_svc.gpu.kernels.lora.replaced import HostRows, ReplacedPlaces, replace_embeddings, replace_logits
from executor_svc.gpu.kernels.lora.tables import RowTable


@dataclass(frozen=True, slots=True)
class GpuPackedPart:
    """Implements `device.adapters.PackedPart`, for a linear or a table of embeddings."""

    memory: Tensor
    pairs: PackedPairs | None
    embedding: PackedEmbedding | None
    replaced: HostRows | None


class _HeldParts:
    """Keeps the parts whose memory steps read: those in places, and others until the steps before have run."""

    def __init__(self, num_places: int, device: torch.device) -> None:
        self._device = device
        self._parts: list[GpuPackedPart | None] = [None] * num_places
        self._former: deque[tuple[torch.cuda.Event, GpuPackedPart]] = deque()

    def set(self, place: int, packed: PackedPart | None) -> GpuPackedPart | None:
        """Keep a part for a place, and return it; raises ValueError for a place that there is not."""
        if not 0 <= place < len(self._parts):
            raise ValueError(f"adapter place {place}: there are {len(self._parts)}")
        assert packed is None or isinstance(packed, GpuPackedPart)
        while self._former and self._former[0][0].query():
            self._former.popleft()
        before, self._parts[place] = self._parts[place], packed
        if before is not None and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._former.append((event, before))
        return packed


class GpuAdapterPlaces:
    """Implements `device.adapters.AdapterPlaces`."""

    def __init__(
        self,
        num_places: int,
        max_rank: int,
        in_features: int,
        part_columns: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        replaces_rows: bool,
    ) -> None:
        """Arguments as in `AdapterKernels.new_adapter_places`. Raises ValueError naming the option."""
        *first_rows, out_features = accumulate(part_columns, initial=0)
        shape = LoraShape(in_features, out_features, tuple(first_rows))
        self.products = LoraPlaces.empty(shape, num_places, max_rank, dtype, device)
        self.replaced = ReplacedPlaces(in_features, out_features, num_places, dtype, device) if replaces_rows else None
        self._held = _HeldParts(num_places, device)

    def bytes_of_rank(self, rank: int) -> int:
        """As in `AdapterPlaces`."""
        return self.products.packed_bytes([rank] * self.products.num_parts)

    def packed_bytes(self, parts: Sequence[AdapterPart], replaced: ReplacedRows | None = None) -> int:
        """As in `AdapterPlaces`."""
        self.products.check(parts)
        total = self.products.packed_bytes([part.a.shape[0] for part in parts])
        if replaced is None:
            return total
        if self.replaced is None:
            raise ValueError("rows of this linear's weight cannot be replaced")
        return total + self.replaced.packed_bytes(replaced)

    def pack(self, parts: Sequence[AdapterPart], replaced: ReplacedRows | None, memory: Tensor) -> GpuPackedPart:
        """As in `AdapterPlaces`."""
        self.packed_bytes(parts, replaced)
        taker = Taker(memory)
        rows = None if replaced is None or self.replaced is None else self.replaced.pack(replaced, taker)
        return GpuPackedPart(memory, self.products.pack(parts, taker) if parts else None, None, rows)

    @torch.inference_mode()
    def set(self, place: int, packed: PackedPart | None) -> None:
        """As in `AdapterPlaces`; enqueues copies."""
        part = self._held.set(place, packed)
        self.products.set(place, None if part is None else part.pairs)
        if self.replaced is not None:
            self.replaced.set(place, None if part is None else part.replaced)

    def workspace_size(self, num_rows: int) -> int:
        """Return the numbers of the workspace of steps of at most so many rows."""
        return workspace_size(self.products.shape, self.products.max_rank, num_rows)

    def add(self, x: Tensor, table: RowTable, workspace: Tensor, y: Tensor) -> None:
        """Enqueue `AdapterKernels.add_adapters`, with a table of exactly the rows of x."""
        if self.replaced is not None:
            replace_logits(x, self.replaced, table, y)
        add_lora(x, self.products, table, workspace, y)


class GpuEmbeddingPlaces:
    """Implements `device.adapters.EmbeddingPlaces`."""

    def __init__(
        self, num_places: int, max_rank: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Arguments as in `AdapterKernels.new_embedding_places`. Raises ValueError naming the option."""
        self.pairs = EmbeddingMatrices(hidden_size, num_places, max_rank, dtype, device)
        self.replaced = ReplacedPlaces(hidden_size, None, num_places, dtype, device)
        self._held = _HeldParts(num_places, device)

    def bytes_of_rank(self, vocabulary: int, rank: int) -> int:
        """As in `EmbeddingMatrices`."""
        return self.pairs.bytes_of_rank(vocabulary, rank)

    def packed_bytes(self, pair: EmbeddingPair | None, replaced: ReplacedRows | None = None) -> int:
        """As in `AdapterPlaces`."""
        total = 0 if pair is None else self.pairs.packed_bytes(pair)
        return total if replaced is None else total + self.replaced.packed_bytes(replaced)

    def pack(self, pair: EmbeddingPair | None, replaced: ReplacedRows | None, memory: Tensor) -> GpuPackedPart:
        """As in `AdapterPlaces`."""
        self.packed_bytes(pair, replaced)
        taker = Taker(memory)
        embedding = None if pair is None else self.pairs.pack(pair, taker)
        return GpuPackedPart(memory, None, embedding, None if replaced is None else self.replaced.pack(replaced, taker))

    @torch.inference_mode()
    def set(self, place: int, packed: PackedPart | None) -> None:
        """As in `AdapterPlaces`; enqueues copies."""
        part = self._held.set(place, packed)
        self.pairs.set(place, None if part is None else part.embedding)
        self.replaced.set(place, None if part is None else part.replaced)

    def workspace_size(self, num_rows: int) -> int:
        """Return the numbers of the workspace of steps of at most so many rows."""
        return embedding_workspace_size(self.pairs.products.max_rank, num_rows)

    def add(self, token_ids: Tensor, table: RowTable, workspace: Tensor, y: Tensor) -> None:
        """Enqueue `AdapterKernels.add_embedding_adapters`, with a table of exactly the rows of y."""
        replace_embeddings(token_ids, self.replaced, table, y)
        add_embedding_lora(token_ids, self.pairs, table, workspace, y)
