"""The interfaces of model architectures: for the runner, and for loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Embedding, Kernels, Linear, Rope, WeightRows
from executor_svc.device.states import StateMemory, StatePlan
from executor_svc.device.stored_linear import QuantRows, StoredLinear
from executor_svc.plan.description import LayerHeads
from executor_svc.plan.state_sizes import LayerState


class ModelConfigError(ValueError):
    """A config.json needs a feature that this architecture's code lacks; the message names the field."""


class StoredWeight(Protocol):
    """A tensor of a source, known to be there in this shape, and not read yet. It is read once."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def blocks(self, rows: int) -> Iterator[Tensor]:
        """Yield the tensor in the model's dtype, on the CPU, `rows` rows at a time; valid until the next block.

        Raises LoaderError if its file cannot be read.
        """
        ...

    def whole(self) -> Tensor:
        """Return the tensor in the model's dtype, on the device; errors as those of `blocks`."""
        ...


class WeightSource(Protocol):
    """The source of a model's tensors."""

    def open(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """Return a tensor to be read later; raises LoaderError if it is missing or has another shape."""
        ...

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        """Return the weight of a linear or of an embedding, dense or in few bits, to be read later.

        prefix: the module's name, such as model.layers.0.mlp.up_proj, whose tensors are prefix.weight and others;
        shape: [out_features, in_features], or [vocabulary, hidden]. Raises LoaderError, before it takes memory, if
        tensors are missing, have wrong shapes, or are in a format that is not supported.
        """
        ...

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in dtype, by default the model's; raises LoaderError if it is missing or misshapen."""
        ...


class Builder(Protocol):
    """The part of a device that builds models."""

    torch_device: torch.device
    dtype: torch.dtype

    @property
    def kernels(self) -> Kernels: ...

    def prepare_linear(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> Linear:
        """Prepare a weight [out_features, in_features] for use."""
        ...

    def prepare_embedding(self, name: str, weight: WeightRows | StoredLinear) -> Embedding:
        """Prepare a weight [vocabulary, hidden] as a table of embeddings."""
        ...

    def prepare_tied(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear]:
        """Prepare a weight [vocabulary, hidden] as a table of embeddings and as a linear, held once."""
        ...


class CausalLM(Protocol):
    """A causal language model whose keys and values live in the paged cache."""

    attention_shapes: tuple[AttentionShape, ...]
    """The distinct shapes of its layers' attention: one for most models, two if only some layers have a window."""
    windows: tuple[int | None, ...]
    """The window of each layer's attention."""
    layer_heads: tuple[LayerHeads, ...]
    """What each layer keeps in the cache."""
    layer_states: tuple[LayerState | None, ...]
    """What each layer keeps of a sequence beside that; None: nothing."""
    num_layers: int
    vocab_size: int

    def new_ropes(self, positions: Tensor) -> list[Rope]:
        """Return each kind of rotary embedding, for tokens at `positions` [max_tokens] int64; steps fill positions."""
        ...

    def fill_ropes(self, positions: Tensor, rope_lens: Tensor, ropes: Sequence[Rope]) -> None:
        """Set ropes for a step; positions, rope_lens: [T] int64, as in `forward_batch.ForwardBatch`."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        ropes: Sequence[Rope],
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        tables: Sequence[int] = (),
        states: Sequence[StateMemory | None] = (),
        state_plan: StatePlan | None = None,
    ) -> Tensor:
        """Return hidden states [T, hidden] before the final norm; every operation is one of the device's kernels.

        Args:
            token_ids: [T] int64, as in `forward_batch.ForwardBatch`.
            ropes: from `new_ropes`.
            kv_layers: the cache of each layer, [N, 2, KVH, B, DP].
            plans: one for each of `attention_shapes`.
            tables: of each layer, the block table of the plans that names its pages; empty: the first.
            states: the memory of each of `layer_states`; empty: the model has none.
            state_plan: of the step, where there are states.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab_size] for hidden [R, hidden]: rounded to the model's dtype, as float32."""
        ...
