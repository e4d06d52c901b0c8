"""EAGLE-3 heads (Li et al., 2025, arXiv 2503.01840): a decoder of a layer or a few over a target's hidden states.

Row p of a sequence reads the target's states at position p and the token at position p + 1, and its logits are of the
token at position p + 2. Its keys and values lie at slot p of the head's own layers. Where the target's states are not
known yet, because the token is a draft, the head's own result for the row before takes their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Embedding, Kernels, Linear, Rope
from executor_svc.models.decoder import attention_shape, layer_heads
from executor_svc.models.heads.eagle3_spec import Eagle3Spec
from executor_svc.models.layers.norm import Norm
from executor_svc.models.layers.rope import Rotary
from executor_svc.models.weights.decoder_weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """A head's tensors, ready to run."""

    embedding: Embedding
    fc: Linear
    """From the target's states, side by side, to a hidden state."""
    input_norms: tuple[Norm, ...]
    """Norms before `fc`: none, one norm for all states together, or one norm for each state."""
    hidden_norm: Norm
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Linear


class Eagle3Head:
    """A head, ready to run; every operation is one of the device's kernels, so that it can be recorded."""

    def __init__(
        self,
        spec: Eagle3Spec,
        weights: Eagle3Weights,
        attention_shapes: Sequence[AttentionShape],
        rotaries: Sequence[Rotary],
        target_ids: Tensor | None,
        kernels: Kernels,
    ) -> None:
        """attention_shapes: one for each layer; rotaries: likewise."""
        self.num_layers = spec.decoder.num_layers
        self.vocab_size = spec.decoder.vocab_size
        self.hidden_size = spec.decoder.hidden_size
        self.draft_vocab_size = spec.draft_vocab_size
        self.state_layers = spec.state_layers
        """What the target's `forward_with_states` takes."""
        self.target_ids = target_ids
        """[draft_vocab_size] int64: the target's id of each id of the head; None: they are the same ids."""
        self.attention_shapes: tuple[AttentionShape, ...] = tuple(dict.fromkeys(attention_shapes))
        """As in `models.base.CausalLM`."""
        self.layer_heads = layer_heads(spec.decoder)
        self._plan_of = [self.attention_shapes.index(shape) for shape in attention_shapes]
        self._rotaries = list(dict.fromkeys(rotaries))
        self._rotary_of = [self._rotaries.index(rotary) for rotary in rotaries]
        self._spec = spec
        self._weights = weights
        self._kernels = kernels

    def new_ropes(self, positions: Tensor) -> list[Rope]:
        """As in `models.base.CausalLM`."""
        return [rotary.new(positions) for rotary in self._rotaries]

    def fill_ropes(self, positions: Tensor, rope_lens: Tensor, ropes: Sequence[Rope]) -> None:
        """As in `models.base.CausalLM`."""
        for rotary, rope in zip(self._rotaries, ropes, strict=True):
            rotary.fill(positions, rope_lens, rope)

    def combine(self, states: Tensor) -> Tensor:
        """Return the hidden states [T, hidden] for a target's states [T, layers * target hidden].

        states: as `Decoder.forward_with_states` returns them; may be overwritten. The result has memory of its own.
        """
        kernels, weights = self._kernels, self._weights
        if self._spec.norm_before_fc:
            states = weights.input_norms[0](states)
        elif self._spec.fc_norm:
            size = self._spec.target_hidden_size
            part = kernels.new_rows("eagle3 part", len(states), size, states.dtype)
            for index, norm in enumerate(weights.input_norms):
                kernels.copy_columns(states, index * size, part, 0, size)
                kernels.copy_columns(norm(part), 0, states, index * size, size)
        return self._copied(weights.fc(states), kernels.new_rows("eagle3", len(states), self.hidden_size, states.dtype))

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        ropes: Sequence[Rope],
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        tables: Sequence[int] = (),
    ) -> Tensor:
        """Write the rows' keys and values, and return hidden states [T, hidden]: `hidden`, overwritten.

        Args:
            token_ids: [T] int64: for the row at position p, the token at position p + 1.
            hidden: [T, hidden]: from `combine`, or the result for the row before, in memory that nothing else uses.
            ropes: from `new_ropes`, for positions p.
            kv_layers: the cache of each of its layers, [N, 2, KVH, B, DP].
            plans: one for each of `attention_shapes`.
            tables: as in `models.base.CausalLM`.
        """
        kernels, spec, weights = self._kernels, self._spec, self._weights
        size, first = self.hidden_size, weights.layers[0]
        # Both norms have the same memory when they are recorded: each is copied before the next one runs.
        both = kernels.new_rows("eagle3 both", len(token_ids), 2 * size, hidden.dtype)
        assert first.before_attention is not None
        embedded = first.before_attention(weights.embedding(token_ids, 1.0))
        kernels.copy_columns(embedded, 0, both, 0, size)
        normed = weights.hidden_norm(hidden)
        kernels.copy_columns(normed, 0, both, size, size)
        if spec.norm_before_residual:
            self._copied(normed, hidden)
        residual, read = hidden, both
        delta: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            assert layer.before_mlp is not None
            assert layer.attention is not None
            assert layer.mlp is not None
            if delta is not None:
                assert layer.before_attention is not None
                read, residual = layer.before_attention.of_sum(delta, residual)
            rope, plan = ropes[self._rotary_of[index]], plans[self._plan_of[index]]
            attended = layer.attention(read, rope, kv_layers[index], plan, tables[index] if tables else 0)
            normed, residual = layer.before_mlp.of_sum(attended, residual)
            delta = layer.mlp(normed)
        assert delta is not None
        residual = kernels.add(delta, residual)
        return self._copied(weights.norm(residual), residual) if spec.norm_output else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, draft_vocab_size] of results [R, hidden] of `forward`: rounded to the dtype, as float32."""
        kernels, weights = self._kernels, self._weights
        normed = hidden
        if not self._spec.norm_output:
            normed = weights.norm(hidden)
        return kernels.finish_logits(weights.head(normed, torch.float32), hidden.dtype, 1.0, None)

    def to_target(self, ids: Tensor) -> Tensor:
        """Return the target's ids of the head's ids, of any shape, int64."""
        return ids if self.target_ids is None else self.target_ids[ids]

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits [R, vocab_size] by the target's ids, -inf for ids that the head lacks; cannot be recorded."""
        if self.target_ids is None:
            return logits
        wide = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        wide[:, self.target_ids] = logits
        return wide

    def _copied(self, source: Tensor, target: Tensor) -> Tensor:
        return self._kernels.copy_columns(source, 0, target, 0, target.shape[1])


def attention_shapes(spec: Eagle3Spec, kernels: Kernels) -> list[AttentionShape]:
    """Return the shape of each layer's attention."""
    return [attention_shape(spec.decoder, layer, kernels) for layer in spec.decoder.layers]
