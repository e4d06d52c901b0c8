"""What operations of LoRA adapters must give: random adapters are put into two places while steps are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor_svc.device.adapters import EmbeddingPair, PackedPart, ReplacedRows
from executor_svc.gpu.checks.meanings import Meaning, Move, Values
from executor_svc.gpu.kernels.lora.adapter_places import GpuAdapterPlaces, GpuEmbeddingPlaces
from executor_svc.gpu.kernels.lora.places import LoraPair
from executor_svc.models.adapters.adapter import EmbeddingPart, TokenRows
from executor_svc.plan.arrays import IntArray

ADAPTER_OPERATIONS = ("add_adapters", "add_embedding_adapters", "scale_rows")
_PLACES = 2
_SMALL_RANK = 8
"""Of the second adapter; the first has the largest."""
_SCALE = 0.5
_REPLACED = 37
"""Every so many tokens one has rows of the adapter's own, in tables of embeddings and heads that may."""

Places = GpuAdapterPlaces | GpuEmbeddingPlaces


@dataclass(frozen=True, slots=True)
class _Content:
    """What an adapter adds to one linear or table of embeddings."""

    pairs: Sequence[LoraPair] = ()
    embedding: EmbeddingPair | None = None
    replaced: ReplacedRows | None = None


@dataclass(slots=True)
class CheckedAdapters:
    """What two adapters are in the places of a model, and which rows of a step have them."""

    contents: Mapping[Places, Sequence[_Content]]
    """By place."""
    rows: dict[int, IntArray] = field(default_factory=dict)
    """By the identity of a table of rows: the place of each."""

    @classmethod
    def of(cls, calls: Mapping[str, Values], vocab_size: int) -> CheckedAdapters:
        """Return random ones for the places of these calls, the first of each label: others are not compared."""
        generator, contents = torch.Generator().manual_seed(0), dict[Places, Sequence[_Content]]()
        for values in calls.values():
            places = values.get("places")
            if isinstance(places, Places) and places not in contents:
                contents[places] = [_random(places, index, vocab_size, generator) for index in range(_count(places))]
        return cls(contents)

    @property
    def num_places(self) -> int:
        return min(map(_count, self.contents))

    @contextmanager
    def in_places(self) -> Iterator[None]:
        """Inside, the places hold them; nothing afterwards."""
        for places, contents in self.contents.items():
            for index, content in enumerate(contents):
                places.set(index, _packed(places, content))
        try:
            yield
        finally:
            for _ in range(2):  # the second time places let go what steps before the first may have read
                for places, contents in self.contents.items():
                    for index in range(len(contents)):
                        places.set(index, None)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()

    def place_of(self, rows: Any, n: int) -> Tensor:
        """Return the place of each of the first n rows of a table, -1 for none."""
        return torch.from_numpy(self.rows[id(rows)][:n].astype(np.int64))


def _count(places: Places) -> int:
    products = places.products if isinstance(places, GpuAdapterPlaces) else places.pairs.products
    return min(_PLACES, products.max_loras)


def _random(places: Places, index: int, vocab_size: int, generator: torch.Generator) -> _Content:
    """Return the content of a place, whose numbers are those of the places' dtype."""
    products = places.products if isinstance(places, GpuAdapterPlaces) else places.pairs.products
    dtype, rank = products.a.dtype, products.max_rank if index == 0 else min(_SMALL_RANK, products.max_rank)

    def numbers(rows: int, columns: int, divisor: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / divisor).to(dtype)

    hidden = products.shape.in_features or products.shape.out_features
    replaced = None
    if places.replaced is not None:
        ids = torch.arange(index, vocab_size, _REPLACED)
        replaced = TokenRows(ids, numbers(len(ids), hidden, hidden**0.5))
    if isinstance(places, GpuEmbeddingPlaces):
        pair = EmbeddingPart(numbers(vocab_size, rank, 1.0), numbers(hidden, rank, rank**0.5), _SCALE)
        return _Content(embedding=pair, replaced=replaced)
    pairs = [
        LoraPair(numbers(rank, hidden, hidden**0.5), numbers(end - first, rank, rank**0.5), _SCALE, first)
        for first, end in products.shape.parts
    ]
    return _Content(pairs, replaced=replaced)


def _packed(places: Places, content: _Content) -> PackedPart:
    if isinstance(places, GpuAdapterPlaces):
        memory = _memory(places.packed_bytes(content.pairs, content.replaced), places.products.b.device)
        return places.pack(content.pairs, content.replaced, memory)
    memory = _memory(places.packed_bytes(content.embedding, content.replaced), places.pairs.products.b.device)
    return places.pack(content.embedding, content.replaced, memory)


def _memory(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _add_adapters(v: Values, n: int, to: Move) -> list[Tensor]:
    x, y, adapters = to(v["x"][:n]).double(), to(v["y"][:n]).double().clone(), v["adapters"]
    place = adapters.place_of(v["rows"], n)
    for index, content in enumerate(adapters.contents.get(v["places"], ())):
        (rows,) = torch.nonzero(place == index, as_tuple=True)
        if content.replaced is not None:
            y[rows[:, None], content.replaced.token_ids] = x[rows] @ content.replaced.rows.double().T
        for pair in content.pairs:
            own = slice(pair.first_row, pair.first_row + len(pair.b))
            y[rows, own] += pair.scale * (x[rows] @ pair.a.double().T @ pair.b.double().T)
    return [y]


def _add_embedding_adapters(v: Values, n: int, to: Move) -> list[Tensor]:
    ids, y, adapters = to(v["token_ids"][:n]), to(v["y"][:n]).double().clone(), v["adapters"]
    place = adapters.place_of(v["rows"], n)
    for index, content in enumerate(adapters.contents.get(v["places"], ())):
        has, pair, replaced = place == index, content.embedding, content.replaced
        own = has & torch.isin(ids, replaced.token_ids)
        y[own] = replaced.rows.double()[torch.searchsorted(replaced.token_ids, ids[own])]
        y[has] += pair.scale * (pair.a.double()[ids[has]] @ pair.b.double().T)
    return [y]


MEANINGS: dict[str, Meaning] = {
    "add_adapters": Meaning(_add_adapters, replaceable=False),
    "add_embedding_adapters": Meaning(_add_embedding_adapters, replaceable=False),
}
"""By the name of the method of `GpuKernels`. Arguments also have `adapters`: a `CheckedAdapters`."""
