"""Heads of multi-token prediction (DeepSeek-V3, 2024, arXiv 2412.19437), as MiMo has one: a layer of its decoder.

Row p of a sequence reads the target's hidden state at position p, before the target's final norm, and the embedding of
the token at position p + 1; its logits, by the target's own head, are of the token at position p + 2. Its keys and
values lie at slot p of the head's own layer. Behind the last row it reads its own results, which are normalized: so
one layer makes any number of drafts, each less sure than the one before. Those of Qwen, a layer of full attention, with
experts where the target has such, read states behind the final norm, and the embedding first, as in llama.cpp's
models/qwen35.cpp and vLLM's qwen3_next_mtp.py.

What it computes is what vLLM's mimo_mtp.py computes (written by Xiaomi), with one exception: vLLM sets the embedding of
row 0 to zero, which is a fault there (github.com/vllm-project/vllm/issues/33299), for row 0 has a token like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Embedding, Kernels, Linear, Rope
from executor_svc.models.decoder import layer_heads
from executor_svc.models.layers.norm import Norm
from executor_svc.models.layers.rope import Rotary
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.models.weights.decoder_weights import LayerWeights


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """A head's tensors, ready to run."""

    embedding: Embedding
    """The target's."""
    hidden_norm: Norm
    token_norm: Norm
    input_proj: Linear
    """From a normalized hidden state and a normalized embedding, side by side, to a hidden state."""
    layer: LayerWeights
    norm: Norm
    head: Linear
    """The target's."""
    state_norm: Norm | None = None
    """The target's final norm, if the head reads what that returns."""
    token_first: bool = False
    """As of `MtpForm`."""


class MtpHead:
    """Implements `heads.head.DraftHead`; every operation is one of the device's kernels, so that it can be recorded."""

    def __init__(
        self,
        spec: DecoderSpec,
        num_target_layers: int,
        weights: MtpWeights,
        attention_shape: AttentionShape,
        rotary: Rotary,
        kernels: Kernels,
    ) -> None:
        """spec: of a decoder that consists of the head's layer; its vocabulary is the target's."""
        self.num_layers = 1
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.state_layers: tuple[int, ...] = (num_target_layers,)
        self.target_ids: Tensor | None = None
        self.attention_shapes: tuple[AttentionShape, ...] = (attention_shape,)
        self.layer_heads = layer_heads(spec)
        self._rotary = rotary
        self._spec = spec
        self._weights = weights
        self._kernels = kernels

    def new_ropes(self, positions: Tensor) -> list[Rope]:
        """As in `models.base.CausalLM`."""
        return [self._rotary.new(positions)]

    def fill_ropes(self, positions: Tensor, rope_lens: Tensor, ropes: Sequence[Rope]) -> None:
        """As in `models.base.CausalLM`."""
        self._rotary.fill(positions, rope_lens, ropes[0])

    def combine(self, states: Tensor) -> Tensor:
        """As in `DraftHead`: the states [T, hidden], as they are or normalized, in memory of their own."""
        norm = self._weights.state_norm
        rows = states if norm is None else norm(states)
        return self._copied(rows, self._kernels.new_rows("mtp", len(states), self.hidden_size, states.dtype))

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        ropes: Sequence[Rope],
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        tables: Sequence[int] = (),
    ) -> Tensor:
        """As in `DraftHead`; hidden must be in memory that nothing else uses."""
        kernels, weights, size = self._kernels, self._weights, self.hidden_size
        layer = weights.layer
        # Operations of one shape have one memory when they are recorded: each result is copied before the next one.
        both = kernels.new_rows("mtp both", len(token_ids), 2 * size, hidden.dtype)
        of_token, of_hidden = (0, size) if weights.token_first else (size, 0)
        kernels.copy_columns(weights.hidden_norm(hidden), 0, both, of_hidden, size)
        embedded = weights.embedding(token_ids, 1.0)
        kernels.copy_columns(weights.token_norm(embedded), 0, both, of_token, size)
        residual = self._copied(weights.input_proj(both), hidden)
        assert layer.before_attention is not None
        assert layer.before_mlp is not None
        assert layer.attention is not None
        assert layer.mlp is not None
        normed = layer.before_attention(residual)
        attended = layer.attention(normed, ropes[0], kv_layers[0], plans[0], tables[0] if tables else 0)
        normed, residual = layer.before_mlp.of_sum(attended, residual)
        residual = kernels.add(layer.mlp(normed), residual)
        return self._copied(weights.norm(residual), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab_size] of results [R, hidden] of `forward`: rounded to the dtype, as float32."""
        logits = self._weights.head(hidden, torch.float32)
        return self._kernels.finish_logits(logits, hidden.dtype, 1.0, None)

    def to_target(self, ids: Tensor) -> Tensor:
        """As in `DraftHead`: they are the same ids."""
        return ids

    def spread(self, logits: Tensor) -> Tensor:
        """As in `DraftHead`."""
        return logits

    def _copied(self, source: Tensor, target: Tensor) -> Tensor:
        return self._kernels.copy_columns(source, 0, target, 0, target.shape[1])
