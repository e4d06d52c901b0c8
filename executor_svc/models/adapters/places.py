"""The places of a model's adapters: memory for all of them in each linear, and what fills it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import get_args

import torch

from executor_svc.device.adapters import AdapterKernels, AdapterRows
from executor_svc.device.kernels import AttentionShape, Embedding, Linear
from executor_svc.models.adapters.adapter import Adapter
from executor_svc.models.adapters.linears import AdaptedEmbedding, AdaptedLinear, AdapterSwitch
from executor_svc.models.adapters.modules import LinearName, decoder_modules
from executor_svc.models.adapters.padded import pad_part
from executor_svc.models.spec import DecoderSpec

LinearUse = tuple[int | None, LinearName]
"""A linear of a model: its layer, None for the head, and its name."""

_HEAD: LinearUse = (None, "lm_head")


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """What memory is taken for adapters."""

    num_places: int
    """--max-loras"""
    max_rank: int
    """--max-lora-rank"""


class ModelAdapters:
    """Owns all places of a model, which is built with `building.AdaptingBuilder`."""

    def __init__(self, kernels: AdapterKernels, spec: DecoderSpec, sizes: AdapterSizes, dtype: torch.dtype) -> None:
        self.kernels, self.sizes = kernels, sizes
        self._dtype, self._hidden_size = dtype, spec.hidden_size
        self._shape = AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            kernels.padded_head_size(spec.head_size),
            spec.attention_scale,
        )
        self._columns = _part_columns(spec, self._shape)
        self._switch = AdapterSwitch()
        self._linears: dict[LinearUse, AdaptedLinear] = {}
        self._embedding: AdaptedEmbedding | None = None
        self._built: Counter[str] = Counter()

    # ------------------------------------------------------------------ building

    def adapt_linear(self, name: str, base: Linear) -> Linear:
        """Return a linear with places; those of one name come in the order of the layers."""
        use = _use(name, self._built[name])
        self._built[name] += 1
        sizes = self.sizes.num_places, self.sizes.max_rank
        places = self.kernels.new_adapter_places(
            *sizes, base.in_features, self._columns[use], self._dtype, replaces_rows=use == _HEAD
        )
        self._linears[use] = AdaptedLinear(base, places, self.kernels, self._switch)
        return self._linears[use]

    def adapt_embedding(self, base: Embedding) -> Embedding:
        """Return the model's table of embeddings with places."""
        assert self._embedding is None, "a decoder has one table"
        sizes = self.sizes
        places = self.kernels.new_embedding_places(sizes.num_places, sizes.max_rank, self._hidden_size, self._dtype)
        self._embedding = AdaptedEmbedding(base, places, self.kernels, self._switch)
        return self._embedding

    # ------------------------------------------------------------------ places

    @property
    def num_bytes(self) -> int:
        """Memory of the places; that of tables and single tokens' rows is taken when an adapter has them."""
        embedding = 0 if self._embedding is None else self._embedding.places.num_bytes
        return embedding + sum(linear.places.num_bytes for linear in self._linears.values())

    def load(self, place: int, adapter: Adapter) -> None:
        """Put an adapter into a place, 0 to num_places - 1, instead of what is there.

        No step may use the place meanwhile; others may run: any thread may load. Raises ValueError for an adapter that
        does not fit; the place is empty then.
        """
        self.clear(place)
        if unknown := adapter.linears.keys() - self._linears.keys():
            raise ValueError(f"the model has no {sorted(map(str, unknown))[0]}")
        try:
            for use, linear in self._linears.items():
                parts = [pad_part(part, use[1], self._shape) for part in adapter.linears.get(use, ())]
                linear.places.load(place, parts, adapter.head_rows if use == _HEAD else None)
            assert self._embedding is not None
            self._embedding.places.load(place, adapter.embedding, adapter.embedding_rows)
        except ValueError:
            self.clear(place)
            raise

    def clear(self, place: int) -> None:
        """Empty a place; its rows are then those of the base. Conditions as those of `load`."""
        for linear in self._linears.values():
            linear.places.clear(place)
        if self._embedding is not None:
            self._embedding.places.clear(place)

    # ------------------------------------------------------------------ steps

    def new_rows(self, max_rows: int) -> AdapterRows:
        """Return a table of rows, for steps of at most max_rows."""
        return self.kernels.new_adapter_rows(max_rows)

    def on(self, rows: AdapterRows) -> AbstractContextManager[None]:
        """Inside, the model's operations add what the adapters of a table's rows add."""
        return self._switch.on(rows)


def _use(name: str, index: int) -> LinearUse:
    for known in get_args(LinearName):
        if name == known:
            return (None if known == "lm_head" else index), known
    raise AssertionError(f"{name} is no linear of a decoder")


def _part_columns(spec: DecoderSpec, shape: AttentionShape) -> Mapping[LinearUse, list[int]]:
    """Return the columns of each module of each linear, heads padded."""
    found: dict[LinearUse, list[int]] = {}
    for module in decoder_modules(spec).values():
        if module.linear is not None:
            columns = module.shape[0]
            if module.linear == "attention.qkv":
                columns = columns // shape.head_size * shape.padded_head_size
            found.setdefault((module.layer, module.linear), []).append(columns)
    return found
