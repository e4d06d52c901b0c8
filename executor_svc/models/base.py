"""What every model architecture offers to the runner, and what it is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_svc.kernels.interface import AttentionPlan, AttentionShape, Kernels, Linear


class ModelConfigError(ValueError):
    """A config.json asks for something that this architecture's code does not do; the message names the field."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Sizes of a loaded model."""

    name: str
    """The folder or hub id as the user gave it."""
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    """Most tokens of a sequence, prompt and completion together."""
    dtype: str
    """float32 or bfloat16: of weights and activations."""
    num_parameters: int
    """Tied weights count once."""
    weight_bytes: int
    """num_parameters in the model's dtype."""


class WeightSource(Protocol):
    """Where a model's tensors come from, one by one."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor in the model's dtype; raises LoaderError if it is missing or has another shape."""
        ...


class Builder(Protocol):
    """The part of a device that a model needs while it is built."""

    torch_device: torch.device
    dtype: torch.dtype

    @property
    def kernels(self) -> Kernels: ...

    def prepare_linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Make a weight [out_features, in_features] ready for use."""
        ...


class CausalLM(Protocol):
    """A causal language model whose keys and values live in the paged cache."""

    attention_shape: AttentionShape
    num_layers: int
    vocab_size: int

    def forward(self, token_ids: Tensor, positions: Tensor, kv_layers: Sequence[Tensor], plan: AttentionPlan) -> Tensor:
        """Return hidden states [T, hidden] before the final norm for token_ids and positions [T] int64."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab_size] in the model's dtype for hidden [R, hidden], R at least two."""
        ...


class Architecture(Protocol):
    """How a class of checkpoints is read; `config` is its config.json."""

    def max_positions(self, config: dict[str, Any]) -> int:
        """Return the most positions that the checkpoint was made for."""
        ...

    def sizes(self, config: dict[str, Any]) -> dict[str, int]:
        """Return vocab_size, hidden_size, num_layers, num_heads, num_kv_heads and head_size, checked."""
        ...

    def build(self, config: dict[str, Any], max_model_len: int, weights: WeightSource, builder: Builder) -> CausalLM:
        """Load the model; raises ModelConfigError for what it can not do."""
        ...

    def ignored_tensors(self, config: dict[str, Any]) -> tuple[str, ...]:
        """Return name endings of tensors that checkpoints may hold and the model does not need."""
        ...
