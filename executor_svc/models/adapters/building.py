"""Builds a decoder whose linears and table of embeddings have places for adapters."""

from __future__ import annotations

from torch import Tensor

from executor_svc.device.kernels import Embedding, Kernels, Linear, WeightRows
from executor_svc.device.stored_linear import StoredLinear
from executor_svc.models.adapters.places import ModelAdapters
from executor_svc.models.base import Builder


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
        return self._adapters.adapt_linear(name, self._device.prepare_linear(name, weight, bias))

    def prepare_embedding(self, name: str, weight: WeightRows | StoredLinear) -> Embedding:
        return self._adapters.adapt_embedding(self._device.prepare_embedding(name, weight))

    def prepare_tied(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear]:
        embedding, linear = self._device.prepare_tied(name, weight, bias)
        return self._adapters.adapt_embedding(embedding), self._adapters.adapt_linear(name, linear)
