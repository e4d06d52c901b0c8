"""Adapts a causal LM of transformers to the interface of the executor's own models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Kernels, KVScales, Rope
from executor_svc.device.states import StateMemory, StatePlan
from executor_svc.models.through_transformers.attention import PagedAttention, attending
from executor_svc.models.through_transformers.probe import LayerAttention, ProbeResult
from executor_svc.plan.description import LayerHeads
from executor_svc.plan.state_sizes import LayerState


class HostedModel:
    """Implements `models.base.CausalLM`, but its operations cannot be recorded: `worker.eager_runner` runs it.

    The model rotates by itself, or has learned positions. It uses only the positions of a rope.
    """

    def __init__(self, model: Any, found: ProbeResult, mask: Tensor | None, kernels: Kernels) -> None:
        """model: with Cadenza's attention; found: its probe; mask: an argument of all its calls."""
        self._model = model
        self._base: Any = found.base
        self._mask = mask
        self._kernels = kernels
        self.num_layers = len(found.layers)
        self.vocab_size = found.vocab_size
        shapes = [_shape_of(layer, kernels) for layer in found.layers]
        self.attention_shapes: tuple[AttentionShape, ...] = tuple(dict.fromkeys(shapes))
        self.windows = tuple(shape.window for shape in shapes)
        self._plan_of = [self.attention_shapes.index(shape) for shape in shapes]
        self.layer_states: tuple[LayerState | None, ...] = (None,) * self.num_layers
        self.layer_heads = tuple(LayerHeads(shape.num_kv_heads, shape.head_size) for shape in shapes)
        self.kv_scales: Sequence[KVScales | None] = [None] * self.num_layers
        """Scales of each layer, for a cache in fp8; must be set before the model runs over such a cache."""
        self._output: Any = None
        self._given: Tensor | None = None
        self._run_base = self._base.forward
        self._base.forward = self._base_forward

    def new_ropes(self, positions: Tensor) -> list[Rope]:
        """Return one rope that rotates nothing, for tokens at `positions` [max_tokens] int64; steps fill positions."""
        none = torch.empty(0, 0, dtype=self._model.dtype, device=self._model.device)
        return [Rope(none, none, positions)]

    def fill_ropes(self, positions: Tensor, rope_lens: Tensor, ropes: Sequence[Rope]) -> None:
        """Nothing to do: the rope holds only positions."""

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
        """Return hidden states [T, hidden], the input of the head; arguments as in `models.base.CausalLM`."""
        attend = PagedAttention(
            self._kernels, self.attention_shapes, self._plan_of, kv_layers, plans, ropes[0], self.kv_scales, tables
        )
        with attending(attend):
            self._output = self._base(
                input_ids=token_ids[None],
                position_ids=ropes[0].rows[None, : len(token_ids)],
                attention_mask=self._mask,
                use_cache=False,
            )
        hidden: Tensor = self._output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab_size] float32 for hidden [R, hidden].

        Runs everything of the model after its base: head, scaling, softcap.
        """
        self._given = hidden[None]
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, position_ids=ids, use_cache=False).logits
        finally:
            self._given = None
        return logits[0].float()

    def _base_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base; during `logits`, return its last output with the given hidden states instead."""
        if self._given is None:
            return self._run_base(*args, **kwargs)
        return type(self._output)(**{**self._output, "last_hidden_state": self._given})


def _shape_of(layer: LayerAttention, kernels: Kernels) -> AttentionShape:
    padded = kernels.padded_head_size(layer.head_size)
    return AttentionShape(
        layer.num_heads, layer.num_kv_heads, layer.head_size, padded, layer.scale, layer.window, layer.softcap
    )
