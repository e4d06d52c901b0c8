"""Reads recurrent layers: their linears as those of attention, in whatever format, and small tensors beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import torch
from torch import Tensor

from executor_svc.device.kernels import Linear
from executor_svc.device.ranks import GatedNormRanks
from executor_svc.device.states import StateKernels
from executor_svc.device.stored_linear import QuantRows, StoredLinear
from executor_svc.models.base import Builder, ModelConfigError, WeightSource
from executor_svc.models.files.stored_order import QuantRowsByHead, row_order
from executor_svc.models.layers.factors import ScaledLinear
from executor_svc.models.layers.gated_delta import DeltaTensors, GatedDelta, LowRankGates
from executor_svc.models.layers.mamba import Mamba, MambaTensors
from executor_svc.models.layers.short_conv import ShortConv
from executor_svc.models.parallel.building import RankBuilder
from executor_svc.models.specs.recurrent_spec import GatedDeltaSpec, MambaSpec, RecurrentSpec, ShortConvSpec
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.models.weights.linear_weight import LinearWeight, StoredPart, linear_weight

RecurrentLayer = ShortConv | GatedDelta | Mamba
_INTO, _DECAY, _GATE = "recurrent.in", "recurrent.decay", "recurrent.gate"
"""Names for `models.base.Builder`, like those of `_output`."""


class RecurrentWeights:
    """Builds recurrent layers."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, builder: Builder) -> None:
        self._kernels = _kernels_of(builder)
        self._hidden, self._weights, self._builder = spec.hidden_size, weights, builder

    def layer(self, prefix: str, recurrent: RecurrentSpec) -> RecurrentLayer:
        """Return the recurrent part of a layer; prefix: of its tensors."""
        match recurrent:
            case ShortConvSpec():
                return self._short_conv(prefix, recurrent)
            case GatedDeltaSpec():
                return self._gated_delta(prefix, recurrent)
            case MambaSpec():
                return self._mamba(prefix, recurrent)
        assert_never(recurrent)

    def _short_conv(self, prefix: str, spec: ShortConvSpec) -> ShortConv:
        hidden = self._hidden
        into = self._linear(_INTO, prefix, [spec.into], spec, spec.biased)
        channels = spec.num_channels(hidden)
        output = self._linear(_output(spec), prefix, [spec.output], spec, spec.biased)
        weight = self._conv(prefix + spec.conv, channels, spec.width)
        bias = self._weights.get(f"{prefix}{spec.conv}.bias", (channels,)) if spec.biased else None
        return ShortConv(into, weight, bias, output, self._kernels)

    def _gated_delta(self, prefix: str, spec: GatedDeltaSpec) -> GatedDelta:
        names, shape, low_rank = spec.names, spec.shape, None
        shapes = spec.shapes(self._hidden)
        parts = [self._weights.open_linear(prefix + name, shapes[name]) for name in names.into]
        into = self._builder.prepare_linear(_INTO, self._ordered(parts, spec))
        if names.low_rank is not None:
            uses = zip((_DECAY, _GATE), names.low_rank, strict=True)
            low_rank = LowRankGates(*(self._linear(use, prefix, [name], spec) for use, name in uses))
        rows = (spec.channels,) if len(names.conv) == 1 else (spec.keys, spec.keys, spec.values)
        convs = [self._conv(prefix + name, count, spec.width) for name, count in zip(names.conv, rows, strict=True)]
        by_key = shape.gate_by_key
        tensors = DeltaTensors(
            conv=torch.cat(convs, 1),
            decay=self._decay(
                prefix + (spec.ready_decay if spec.is_decay_ready else spec.decay),
                (1, 1, shape.value_heads, 1) if by_key else (shape.value_heads,),
                spec.is_decay_ready,
            ),
            dt_bias=self._float32(prefix + names.dt_bias, shape.value_heads * (shape.key_size if by_key else 1)),
            norm=self._weights.get(f"{prefix}{names.norm}.weight", (shape.value_size,)),
        )
        output = self._linear(_output(spec), prefix, [spec.output], spec)
        return GatedDelta(shape, into, low_rank, tensors, spec.eps, output, self._kernels)

    def _mamba(self, prefix: str, spec: MambaSpec) -> Mamba:
        name, heads = prefix + spec.name, spec.shape.heads
        into = self._linear(_INTO, prefix, [spec.into], spec, spec.biased)
        output = self._linear(_output(spec), prefix, [spec.output], spec, spec.output_biased)
        if (factors := spec.factors) is not None:
            of_state = spec.shape.groups * spec.shape.state_size
            counts = (spec.inner, spec.inner, of_state, of_state, heads)
            columns = (factors.gate, factors.x, factors.b, factors.c, factors.dt)
            into = scaled(into, list(zip(columns, counts, strict=True)), self._builder)
            output = scaled(output, [(factors.output, self._hidden)], self._builder)
        norm = self._weights.get(f"{name}.norm.weight", (spec.inner,)) if spec.has_norm else None
        if norm is not None and spec.norm_in_fp32:
            norm = norm.float()
        tensors = MambaTensors(
            conv=self._conv(f"{name}.conv1d", spec.channels, spec.width),
            conv_bias=self._weights.get(f"{name}.conv1d.bias", (spec.channels,)) if spec.conv_biased else None,
            decay=self._decay(
                prefix + (spec.ready_decay if spec.is_decay_ready else spec.decay), (heads,), spec.is_decay_ready
            ),
            dt_bias=self._float32(f"{name}.dt_bias", heads),
            d=self._float32(f"{name}.D", heads),
            norm=norm,
        )
        return Mamba(
            spec.shape, into, tensors, spec.limits, spec.eps, spec.norm, output, self._kernels,
            self._ranks_of_groups(spec), spec.groups_of_all,
        )  # fmt: skip

    def _ranks_of_groups(self, spec: MambaSpec) -> GatedNormRanks | None:
        """Return the ranks that have parts of groups, whose columns are normalized together."""
        if not spec.groups_of_all or not spec.has_norm:
            return None
        assert isinstance(self._builder, RankBuilder)
        assert isinstance(self._builder.ranks, GatedNormRanks), "these ranks have no gated norm of groups"
        return self._builder.ranks

    def _linear(self, use: str, prefix: str, names: list[str], spec: RecurrentSpec, biased: bool = False) -> Linear:
        shapes = spec.shapes(self._hidden)
        parts = [self._weights.open_linear(prefix + name, shapes[name]) for name in names]
        bias = None
        if biased:
            bias = torch.cat([self._weights.get(f"{prefix}{name}.bias", shapes[name][:1]) for name in names])
        return self._builder.prepare_linear(use, linear_weight(parts, self._builder.dtype), bias)

    def _ordered(self, parts: list[StoredPart], spec: GatedDeltaSpec) -> LinearWeight | StoredLinear:
        """Return the weight of linears, one below the other, with their rows in the order of the layer."""
        orders, dtype = spec.into_order(), self._builder.dtype
        if not any(orders):
            return linear_weight(parts, dtype)
        put = [_rows_in(row_order(order) if order else None) for order in orders]
        stored = [part for part in parts if not isinstance(part, QuantRows)]
        if len(stored) == len(parts):
            return LinearWeight(stored, dtype, widen=put, multiple=max(part.shape[0] for part in parts))
        return StoredLinear(
            [
                (QuantRowsByHead(part, order) if order else part)
                if isinstance(part, QuantRows)
                else LinearWeight([part], dtype, widen=[each], multiple=part.shape[0])
                for part, order, each in zip(parts, orders, put, strict=True)
            ],
            dtype,
        )

    def _conv(self, name: str, channels: int, width: int) -> Tensor:
        """Return the weight [taps, channels] of a convolution of each channel by itself."""
        return self._weights.get(f"{name}.weight", (channels, 1, width)).view(channels, width).t().contiguous()

    def _float32(self, name: str, count: int) -> Tensor:
        return self._weights.get(name, (count,), torch.float32)

    def _decay(self, name: str, shape: tuple[int, ...], is_ready: bool) -> Tensor:
        """Return -exp(A_log), fp32, whichever of both a file has."""
        stored = self._weights.get(name, shape, torch.float32).flatten()
        return stored if is_ready else -stored.exp()


def _output(spec: RecurrentSpec) -> str:
    """Return what a builder calls the last linear: a rank of a divided layer has some of its columns."""
    return "recurrent.output in parts" if spec.share.size > 1 else "recurrent.output"


def scaled(linear: Linear, factors: Sequence[tuple[float, int]], builder: Builder) -> Linear:
    """Return a linear whose results are multiplied: each factor with so many of its columns."""
    if all(factor == 1.0 for factor, _ in factors):
        return linear
    columns = torch.cat([torch.full((count,), factor) for factor, count in factors])
    return ScaledLinear(linear, columns.to(builder.torch_device, builder.dtype), _kernels_of(builder))


def _kernels_of(builder: Builder) -> StateKernels:
    if not isinstance(builder.kernels, StateKernels):
        raise ModelConfigError("recurrent layers are not supported on this device")
    return builder.kernels


def _rows_in(order: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return what puts all rows of a weight in this order; None: they stay."""

    def put(rows: Tensor) -> Tensor:
        return rows if order is None else rows[order.to(rows.device)]

    return put
