"""A causal LM of transformers behind the interface that the executor knows its own models by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Kernels, KVScales, Rope
from executor_svc.models.through_transformers.attention import PagedAttention, attending
from executor_svc.models.through_transformers.probe import LayerAttention, ProbeResult


class HostedModel:
    """Implements `models.base.CausalLM`, except that its operations can not be recorded: `eager_runner` runs it.

    The model rotates by itself, or has learned positions. Of a rope it takes the positions.
    """

    def __init__(self, model: Any, found: ProbeResult, mask: Tensor | None, kernels: Kernels) -> None:
        """Take a model with our attention, what is known of it, and the mask that it is to be called with."""
        self._model = model
        self._base: Any = found.base
        self._mask = mask
        self._kernels = kernels
        self.num_layers = len(found.layers)
        self.vocab_size = found.vocab_size
        shapes = [_shape_of(layer, kernels) for layer in found.layers]
        self.attention_shapes: tuple[AttentionShape, ...] = tuple(dict.fromkeys(shapes))
        self._plan_of = [self.attention_shapes.index(shape) for shape in shapes]
        self.kv_scales: Sequence[KVScales | None] = [None] * self.num_layers
        """Of each layer, for a cache in fp8; to be set before the model runs over one."""
        self._output: Any = None
        self._given: Tensor | None = None
        self._run_base = self._base.forward
        self._base.forward = self._base_forward

    def new_ropes(self, positions: Tensor) -> list[Rope]:
        """Return one that rotates nothing, for tokens at `positions` [most tokens] int64, which is filled later."""
        none = torch.empty(0, 0, dtype=self._model.dtype, device=self._model.device)
        return [Rope(none, none, positions)]

    def fill_ropes(self, positions: Tensor, rope_lens: Tensor, ropes: Sequence[Rope]) -> None:
        """The positions are all that there is."""

    def forward(
        self,
        token_ids: Tensor,
        ropes: Sequence[Rope],
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        """Return hidden states [T, hidden], as the head takes them; arguments as in `models.base.CausalLM`."""
        attend = PagedAttention(
            self._kernels, self.attention_shapes, self._plan_of, kv_layers, plans, ropes[0], self.kv_scales
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

        All that the model does behind its base is done: head, scaling, softcap.
        """
        self._given = hidden[None]
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, position_ids=ids, use_cache=False).logits
        finally:
            self._given = None
        return logits[0].float()

    def _base_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base, or return what it would have given if these hidden states were its own."""
        if self._given is None:
            return self._run_base(*args, **kwargs)
        return type(self._output)(**{**self._output, "last_hidden_state": self._given})


def _shape_of(layer: LayerAttention, kernels: Kernels) -> AttentionShape:
    padded = kernels.padded_head_size(layer.head_size)
    return AttentionShape(
        layer.num_heads, layer.num_kv_heads, layer.head_size, padded, layer.scale, layer.window, layer.softcap
    )
