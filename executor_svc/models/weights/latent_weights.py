"""Reads a layer's latent attention: what makes keys and values of latents is split by head, and kept dense."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor_svc.device.dense_rows import DenseRows
from executor_svc.device.kernels import AttentionShape, KVScales, WeightRows
from executor_svc.device.latent import HeadLinear, LatentKernels
from executor_svc.device.stored_linear import QuantRows, StoredLinear
from executor_svc.models.base import Builder, WeightSource
from executor_svc.models.layers.attention import HeadRows
from executor_svc.models.layers.latent import LatentAttention, LatentQueries
from executor_svc.models.specs.latent_spec import LatentSpec
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.models.weights.linear_weight import LinearWeight, QuantHeads, StoredPart, linear_weight


class LatentWeights:
    """Builds the attention of a layer."""

    def __init__(
        self,
        spec: DecoderSpec,
        latent: LatentSpec,
        weights: WeightSource,
        builder: Builder,
        norm_weight: Callable[[str, int], Tensor],
    ) -> None:
        """norm_weight: reads the weight of a norm by its module's name and size."""
        assert isinstance(builder.kernels, LatentKernels), "this device has no kernels of latent attention"
        self._spec, self._latent, self._weights, self._builder = spec, latent, weights, builder
        self._kernels: LatentKernels = builder.kernels
        self._norm_weight = norm_weight
        self._shapes = latent.shapes(spec.hidden_size, spec.num_heads, spec.names.output)

    def layer(self, prefix: str, shape: AttentionShape, scales: KVScales | None) -> LatentAttention:
        """Return the attention of a layer; prefix: of its tensors; scales: of its rows in a cache in fp8."""
        spec, latent, builder = self._spec, self._latent, self._builder
        into, out = latent.q
        first = latent.q_whole if latent.query_size is None else into
        down = self._weight(prefix, [first, latent.kv])
        bias = self._bias(prefix, first) if spec.qkv_bias else None
        linear = builder.prepare_linear("attention.latents", down, bias)
        queries = None
        if latent.query_size is not None:
            weight = self._weight(prefix, [out])
            norm = self._norm_weight(prefix + latent.q_norm, latent.query_size)
            queries = LatentQueries(norm, builder.prepare_linear("attention.queries", weight))
        absorb, expand = self._heads(prefix)
        output = linear_weight([self._open(prefix, spec.names.output)], builder.dtype)
        output_bias = None
        if spec.output_bias:
            output_bias = self._named_bias(prefix + spec.names.output, spec.hidden_size)
        return LatentAttention(
            shape,
            linear,
            queries,
            self._norm_weight(prefix + latent.kv_norm, latent.size),
            latent.eps,
            absorb,
            expand,
            builder.prepare_linear("attention.output", output, output_bias),
            scales,
            self._kernels,
        )

    def _open(self, prefix: str, name: str) -> StoredPart:
        return self._weights.open_linear(prefix + name, self._shapes[name])

    def _rows(self, name: str) -> HeadRows:
        return self._latent.rows_of(name, self._spec.rotary_pairs)

    def _weight(self, prefix: str, names: Sequence[str]) -> LinearWeight | StoredLinear:
        """Return the weight of linears, one below the other."""
        parts, dtype = [self._open(prefix, name) for name in names], self._builder.dtype
        rows = [self._rows(name) for name in names]
        if any(isinstance(part, QuantRows) for part in parts):
            return StoredLinear([_part(*each, dtype) for each in zip(parts, rows, strict=True)], dtype)
        return _dense([part for part in parts if not isinstance(part, QuantRows)], rows, dtype)

    def _bias(self, prefix: str, first: str) -> Tensor:
        """Return the bias of the linear into latents; queries that are made of hidden states have none."""
        latent, counts = self._latent, (self._shapes[first][0], self._shapes[self._latent.kv][0])
        if latent.query_size is None:
            queries = torch.zeros(counts[0], dtype=self._builder.dtype, device=self._builder.torch_device)
        else:
            queries = self._named_bias(prefix + first, counts[0])
        return torch.cat([queries, self._rows(latent.kv)(self._named_bias(prefix + latent.kv, counts[1]))])

    def _named_bias(self, module: str, size: int) -> Tensor:
        name = f"{module}.bias"
        if name in self._spec.absent_biases:
            return torch.zeros(size, dtype=self._builder.dtype, device=self._builder.torch_device)
        return self._weights.get(name, (size,))

    def _heads(self, prefix: str) -> tuple[HeadLinear, HeadLinear]:
        """Return what brings queries into the space of latents, and what makes values of latents."""
        latent, kernels, heads = self._latent, self._kernels, self._spec.num_heads
        if latent.is_by_kind:
            keys, values = (self._whole(prefix, name) for name in latent.by_kind)
            absorb, expand = keys.view(heads, latent.size, -1), values.view(heads, -1, latent.size)
        else:
            both = self._whole(prefix, latent.heads).view(heads, -1, latent.size)
            keys, expand = both.split([latent.nope_size, latent.value_size], 1)
            absorb = keys.transpose(1, 2)
        return kernels.head_linear(absorb), kernels.head_linear(expand)

    def _whole(self, prefix: str, name: str) -> Tensor:
        """Return a weight in the model's dtype, whatever it is stored in."""
        stored = linear_weight([self._open(prefix, name)], self._builder.dtype)
        rows = DenseRows(stored, self._builder.torch_device) if isinstance(stored, StoredLinear) else stored
        return rows.whole()


def _part(part: StoredPart, rows: HeadRows, dtype: torch.dtype) -> QuantRows | WeightRows:
    if isinstance(part, QuantRows):
        return part if rows.is_same else QuantHeads(part, rows)
    return _dense([part], [rows], dtype)


def _dense(parts: Sequence[StoredPart], rows: Sequence[HeadRows], dtype: torch.dtype) -> LinearWeight:
    stored = [part for part in parts if not isinstance(part, QuantRows)]
    if all(each.is_same for each in rows):
        return LinearWeight(stored, dtype)
    return LinearWeight(stored, dtype, widen=rows, multiple=math.lcm(*(each.head_size for each in rows)))
