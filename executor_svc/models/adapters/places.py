"""The places of a model's adapters, in each of its linears, and the adapters that they are filled with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor_svc.device.adapters import AdapterKernels, AdapterRows, PackedPart
from executor_svc.device.kernels import AttentionShape, Embedding, Kernels, Linear, WeightRows
from executor_svc.device.ranks import Share
from executor_svc.device.stored_linear import StoredLinear
from executor_svc.models.adapters.adapter import Adapter, LoraPart, TokenRows
from executor_svc.models.adapters.linears import AdaptedEmbedding, AdaptedLinear, AdapterSwitch
from executor_svc.models.adapters.modules import LinearName, decoder_modules
from executor_svc.models.adapters.shares import own_adapter, own_columns
from executor_svc.models.base import Builder
from executor_svc.models.decoder import attention_shape
from executor_svc.models.layers.attention import HeadRows, pad_output
from executor_svc.models.parallel.split import spec_of
from executor_svc.models.specs.spec import EMBEDDINGS, DecoderSpec

LinearUse = tuple[int | None, LinearName]
"""A linear of a model: its layer, None for the head, and its name."""

_HEAD: LinearUse = (None, "lm_head")


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """What a step's adapters may be."""

    num_places: int
    """--max-loras"""
    max_rank: int
    """--max-lora-rank"""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in the order in which a model's kernels read it. Places refer to its memory."""

    linears: Mapping[LinearUse, PackedPart]
    embedding: PackedPart | None
    num_bytes: int


class ModelAdapters:
    """Owns all places of a model, which is built with `AdaptingBuilder`."""

    def __init__(
        self,
        kernels: AdapterKernels,
        spec: DecoderSpec,
        sizes: AdapterSizes,
        dtype: torch.dtype,
        share: Share = Share(),  # noqa: B008 - it cannot be changed
    ) -> None:
        """spec: of the whole model, of which the decoder has a share."""
        self.kernels, self.spec, self.sizes = kernels, spec, sizes
        self._dtype, self._hidden_size, self._share = dtype, spec.hidden_size, share
        own = spec_of(spec, share)
        self._shapes = [attention_shape(own, layer, kernels) for layer in own.layers]
        self._columns = _part_columns(spec, self._shapes, share)
        self._switch = AdapterSwitch()
        self._linears: dict[LinearUse, AdaptedLinear] = {}
        self._embedding: AdaptedEmbedding | None = None
        self._built: Counter[str] = Counter()
        self._uses: dict[str, list[LinearUse]] = {}
        for use in self._columns:  # some layers have an MLP, others experts
            self._uses.setdefault(use[1], []).append(use)

    # ------------------------------------------------------------------ building

    def has(self, name: str) -> bool:
        """Return whether adapters may change the linears of this name."""
        return name in self._uses

    def adapt_linear(self, name: str, base: Linear) -> Linear:
        """Return a linear with places; those of one name come in the order of the layers."""
        use = self._uses[name][self._built[name]]
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

    def bytes_of_rank(self, rank: int) -> int:
        """Return the memory of a packed adapter with pairs of this rank at all linears, the head and the embeddings."""
        assert self._embedding is not None
        table = self._embedding.places.bytes_of_rank(len(self._share.of(self.spec.vocab_size)), rank)
        return table + sum(linear.places.bytes_of_rank(rank) for linear in self._linears.values())

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Return an adapter in the order in which kernels read it; any thread may, beside steps.

        Raises ValueError for an adapter that does not fit the model or its largest rank.
        """
        if adapter.head_rows is not None and self.spec.head_bias:
            raise ValueError("it has rows of a head whose logits have a bias, which is not supported")
        adapter = own_adapter(adapter, self.spec, self._share)
        if unknown := adapter.linears.keys() - self._linears.keys():
            raise ValueError(f"the model has no {sorted(map(str, unknown))[0]}")
        assert self._embedding is not None
        table = self._embedding.places
        tables = adapter.embedding, adapter.embedding_rows
        chosen = {use: self._parts(use, adapter) for use in self._linears if _changes(use, adapter)}
        sizes = [self._linears[use].places.packed_bytes(*parts) for use, parts in chosen.items()]
        memory = self.kernels.new_adapter_memory(sum(sizes) + table.packed_bytes(*tables))
        pieces = memory.split([*sizes, len(memory) - sum(sizes)])
        linears = {
            use: self._linears[use].places.pack(*parts, piece)
            for (use, parts), piece in zip(chosen.items(), pieces, strict=False)
        }
        embedding = None if tables == (None, None) else table.pack(*tables, pieces[-1])
        return PackedAdapter(linears, embedding, memory.nbytes)

    def load(self, place: int, adapter: PackedAdapter) -> None:
        """Put an adapter into a place, 0 to num_places - 1, instead of what is there; no step may run meanwhile.

        This copies addresses, the adapter stays in its memory. Raises ValueError for a place that there is not.
        """
        for use, linear in self._linears.items():
            linear.places.set(place, adapter.linears.get(use))
        if self._embedding is not None:
            self._embedding.places.set(place, adapter.embedding)

    def clear(self, place: int) -> None:
        """Empty a place: rows there are computed by the base alone. The conditions of `load` hold."""
        self.load(place, PackedAdapter({}, None, 0))

    def _parts(self, use: LinearUse, adapter: Adapter) -> tuple[list[LoraPart], TokenRows | None]:
        parts = [self._placed(part, use) for part in adapter.linears.get(use, ())]
        return parts, adapter.head_rows if use == _HEAD else None

    def _placed(self, part: LoraPart, use: LinearUse) -> LoraPart:
        layer, linear = use
        latent = None if layer is None else self.spec.layers[layer].latent
        if latent is not None and linear.startswith("attention."):
            name = part.module.split(".", 3)[3]
            return replace(part, b=latent.rows_of(name, self.spec.rotary_pairs)(part.b))
        spec, is_qkv = self.spec, linear == "attention.qkv"
        rotated = is_qkv and part.module.endswith(spec.names.qkv[:2])
        gated = is_qkv and spec.attention_gate and part.module.endswith(spec.names.qkv[0])
        return pad_part(part, linear, self._shapes[layer or 0], spec.rotary_pairs if rotated else 0, gated)

    # ------------------------------------------------------------------ steps

    def new_rows(self, max_rows: int) -> AdapterRows:
        """Return a table of rows, for steps of at most max_rows."""
        return self.kernels.new_adapter_rows(max_rows)

    def on(self, rows: AdapterRows) -> AbstractContextManager[None]:
        """Inside, the model's operations add what the adapters of a table's rows add."""
        return self._switch.on(rows)


def _changes(use: LinearUse, adapter: Adapter) -> bool:
    return use in adapter.linears or (use == _HEAD and adapter.head_rows is not None)


def _part_columns(spec: DecoderSpec, shapes: Sequence[AttentionShape], share: Share) -> Mapping[LinearUse, list[int]]:
    """Return the columns of each part of each linear of a share of the model, heads padded; shapes: of the layers."""
    found: dict[LinearUse, list[int]] = {}
    for module in decoder_modules(spec).values():
        if module.linear is not None:
            columns = own_columns(module, spec, share)
            if module.linear == "attention.qkv":
                shape = shapes[module.layer or 0]
                columns = [each // shape.head_size * shape.padded_head_size for each in columns]
            found.setdefault((module.layer, module.linear), []).extend(columns)
    return found


class AdaptingBuilder:
    """Implements `models.base.Builder` for one decoder, which asks for its linears layer by layer."""

    def __init__(self, device: Builder, adapters: ModelAdapters) -> None:
        self.torch_device, self.dtype = device.torch_device, device.dtype
        self._device, self._adapters = device, adapters

    @property
    def kernels(self) -> Kernels:
        return self._device.kernels

    def prepare_linear(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> Linear:
        linear = self._device.prepare_linear(name, weight, bias)
        use = name.removesuffix(" in parts")  # of a rank that has some columns of a recurrence's output
        return self._adapters.adapt_linear(use, linear) if self._adapters.has(use) else linear

    def prepare_embedding(self, name: str, weight: WeightRows | StoredLinear) -> Embedding:
        embedding = self._device.prepare_embedding(name, weight)
        return self._adapters.adapt_embedding(embedding) if name == EMBEDDINGS else embedding

    def prepare_tied(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear]:
        embedding, linear = self._device.prepare_tied(name, weight, bias)
        return self._adapters.adapt_embedding(embedding), self._adapters.adapt_linear(name, linear)


def pad_part(
    part: LoraPart, linear: LinearName, shape: AttentionShape, pairs: int = 0, gated: bool = False
) -> LoraPart:
    """Return a part for linears as `layers.attention` places rows: added rows and columns are zero.

    Of attention.qkv the rows of b are those of `HeadRows`, with the first row among padded ones; of attention.output
    the columns of a are widened. Others are returned as they are. pairs, gated: as of `HeadRows`.
    """
    size, padded = shape.head_size, shape.padded_head_size
    rows = HeadRows(size, padded, pairs, gated=gated)
    if rows.is_same:
        return part
    if linear == "attention.qkv":
        return replace(part, b=rows(part.b), first_row=part.first_row // size * padded)
    return replace(part, a=pad_output(part.a, shape)) if linear == "attention.output" else part
