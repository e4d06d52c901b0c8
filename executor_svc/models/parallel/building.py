"""Builds a rank's decoder: its linears and tables, and what makes whole results of the parts of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.kernels import Embedding, Kernels, Linear, WeightRows
from executor_svc.device.ranks import RankKernels
from executor_svc.device.stored_linear import StoredLinear
from executor_svc.models.base import Builder
from executor_svc.models.parallel.split import PARTIAL, ROW_PARALLEL
from executor_svc.models.specs.spec import EMBEDDINGS, HEAD, DecoderSpec


class RankBuilder:
    """Implements `models.base.Builder` for a rank's weights."""

    def __init__(self, device: Builder, ranks: RankKernels, spec: DecoderSpec) -> None:
        """spec: of the whole model."""
        self.torch_device, self.dtype = device.torch_device, device.dtype
        self._device, self._ranks = device, ranks
        self._vocab_size = spec.vocab_size
        self._inputs = spec.layer_inputs

    @property
    def kernels(self) -> Kernels:
        return self._device.kernels

    @property
    def ranks(self) -> RankKernels:
        """What joins the ranks."""
        return self._ranks

    def prepare_linear(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> Linear:
        if name in ROW_PARALLEL:
            return SummedLinear(self._device.prepare_linear(name, weight), bias, self._ranks)
        if name == PARTIAL:  # the bias is added once
            own_bias = bias if self._ranks.share.rank == 0 else None
            return PartialLinear(self._device.prepare_linear(name, weight, own_bias), self._ranks)
        linear = self._device.prepare_linear(name, weight, bias)
        return self._head(linear) if name == HEAD else linear

    def prepare_embedding(self, name: str, weight: WeightRows | StoredLinear) -> Embedding:
        table = self._device.prepare_embedding(name, weight)
        if name == EMBEDDINGS or self._inputs is None:
            return self._embedding(table)
        return OwnersEmbedding(table, self._inputs.vocab_size, self._ranks)

    def prepare_tied(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear]:
        embedding, linear = self._device.prepare_tied(name, weight, bias)
        return self._embedding(embedding), self._head(linear)

    def _head(self, linear: Linear) -> Linear:
        return GatheredHead(linear, self._vocab_size, self._ranks)

    def _embedding(self, embedding: Embedding) -> Embedding:
        return OwnersEmbedding(embedding, self._vocab_size, self._ranks)


class SummedLinear:
    """Implements `device.kernels.Linear`: a rank has some columns of the weight, and the ranks' results are summed."""

    def __init__(self, base: Linear, bias: Tensor | None, ranks: RankKernels) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self._base, self._ranks = base, ranks
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        partial = self._base(x, self._ranks.partial_dtype(x.dtype))
        return self._ranks.sum_partials(partial, self._bias, out_dtype or x.dtype)


class PartialLinear:
    """Implements `device.kernels.Linear`: as `SummedLinear`, without a bias, before the sum."""

    def __init__(self, base: Linear, ranks: RankKernels) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self._base, self._ranks = base, ranks

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._base(x, self._ranks.partial_dtype(x.dtype))


class GatheredHead:
    """Implements `device.kernels.Linear`: a rank has the logits of some tokens, and rank 0 gets those of all."""

    def __init__(self, base: Linear, vocab_size: int, ranks: RankKernels) -> None:
        self.in_features, self.out_features = base.in_features, vocab_size
        self._base, self._ranks = base, ranks
        self._tokens = ranks.share.of(vocab_size)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        assert out_dtype == torch.float32
        return self._ranks.gather_columns(self._base(x, out_dtype), self._tokens.start, self.out_features)


class OwnersEmbedding:
    """Implements `device.kernels.Embedding`: a rank has the rows of some tokens, and every rank gets those of all."""

    def __init__(self, base: Embedding, vocab_size: int, ranks: RankKernels) -> None:
        self._base, self._ranks = base, ranks
        self._tokens = ranks.share.of(vocab_size)

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        tokens = self._tokens
        return self._ranks.embed(self._base, tokens.start, len(tokens), token_ids, scale)
