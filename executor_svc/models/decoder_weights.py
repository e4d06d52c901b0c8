"""Reads a decoder's tensors by their names in transformers' checkpoints, and builds its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionShape, Embedding, HeadNorms, KVScales, Linear
from executor_svc.device.stored_linear import StoredLinear
from executor_svc.models.base import Builder, WeightSource
from executor_svc.models.layers.attention import Attention, fuse_qkv
from executor_svc.models.layers.mlp import GatedMlp
from executor_svc.models.linear_weight import LinearWeight, StoredPart, linear_weight, output_weight, qkv_weight
from executor_svc.models.spec import HEAD, TABLE, DecoderSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer, ready to run."""

    attention: Attention
    mlp: GatedMlp
    before_attention: Tensor
    """Norm weights, as the following ones; None: the model has no such norm."""
    after_attention: Tensor | None
    before_mlp: Tensor
    after_mlp: Tensor | None


class DecoderWeights:
    """Loads layer by layer. The device reads the weight of each linear, so that no second copy of it is needed."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, builder: Builder) -> None:
        self._spec = spec
        self._weights = weights
        self._builder = builder

    def ends(self) -> tuple[Embedding, Linear]:
        """Return the table of embeddings and the linear from hidden states to logits, which may have one weight."""
        if self._spec.tied:
            return self._builder.prepare_tied(HEAD, self._end(TABLE))
        linear = self.head()  # read by threads, beside the table
        return self.embedding(), linear

    def embedding(self) -> Embedding:
        """Return the table of embeddings alone."""
        return self._builder.prepare_embedding("embed_tokens", self._end(TABLE))

    def head(self) -> Linear:
        """Return the linear from hidden states to logits alone."""
        return self._builder.prepare_linear(HEAD, self._end(TABLE if self._spec.tied else HEAD))

    def _end(self, name: str) -> LinearWeight | StoredLinear:
        size = (self._spec.vocab_size, self._spec.hidden_size)
        return linear_weight([self._weights.open_linear(name, size)], self._builder.dtype)

    def final_norm(self) -> Tensor:
        return self.norm("model.norm", self._spec.hidden_size)

    def layer(
        self, index: int, shape: AttentionShape, scales: KVScales | None, columns: int | None = None
    ) -> LayerWeights:
        """Return a layer; scales: of its keys and values; columns: of q, k and v, by default the hidden size."""
        prefix, hidden = f"model.layers.{index}", self._spec.hidden_size
        sandwiched = self._spec.norms_after
        before_mlp = "pre_feedforward_layernorm" if sandwiched else "post_attention_layernorm"
        return LayerWeights(
            before_attention=self.norm(f"{prefix}.input_layernorm", hidden),
            attention=self._attention(f"{prefix}.self_attn", shape, scales, columns or hidden),
            after_attention=self.norm(f"{prefix}.post_attention_layernorm", hidden) if sandwiched else None,
            before_mlp=self.norm(f"{prefix}.{before_mlp}", hidden),
            mlp=self._mlp(f"{prefix}.mlp"),
            after_mlp=self.norm(f"{prefix}.post_feedforward_layernorm", hidden) if sandwiched else None,
        )

    def norm(self, name: str, size: int) -> Tensor:
        """Return a norm's weight, in fp32 if it has an offset: the kernels then multiply in fp32."""
        weight = self._weights.get(f"{name}.weight", (size,))
        offset = self._spec.norm_weight_offset
        return weight.float() + offset if offset else weight

    def _attention(self, prefix: str, shape: AttentionShape, scales: KVScales | None, columns: int) -> Attention:
        spec, dtype = self._spec, self._builder.dtype
        q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        sizes = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        qkv = qkv_weight(self._linears(prefix, "qkv_proj", sizes, columns), dtype, shape)
        qkv_bias = output_bias = norms = None
        if spec.qkv_bias:
            qkv_bias = fuse_qkv(self._biases(prefix, "qkv_proj", sizes), shape)
        stored = self._weights.open_linear(f"{prefix}.o_proj", (spec.hidden_size, q))
        output = output_weight(stored, dtype, shape, self._builder.torch_device)
        if spec.output_bias:
            output_bias = self._bias(f"{prefix}.o_proj", spec.hidden_size)
        if spec.head_norms:
            q_norm, k_norm = (self.norm(f"{prefix}.{name}", spec.head_size) for name in ("q_norm", "k_norm"))
            norms = HeadNorms(q_norm, k_norm, spec.rms_norm_eps)
        return Attention(
            shape,
            self._builder.prepare_linear("attention.qkv", qkv, qkv_bias),
            self._builder.prepare_linear("attention.output", output, output_bias),
            norms,
            scales,
            self._builder.kernels,
        )

    def _mlp(self, prefix: str) -> GatedMlp:
        spec, dtype = self._spec, self._builder.dtype
        hidden, sizes = spec.hidden_size, dict.fromkeys(("gate_proj", "up_proj"), spec.intermediate_size)
        gate_up = linear_weight(self._linears(prefix, "gate_up_proj", sizes, hidden), dtype)
        stored = self._weights.open_linear(f"{prefix}.down_proj", (hidden, spec.intermediate_size))
        down = linear_weight([stored], dtype)
        gate_up_bias = down_bias = None
        if spec.mlp_bias:
            gate_up_bias = torch.cat(self._biases(prefix, "gate_up_proj", sizes))
            down_bias = self._bias(f"{prefix}.down_proj", hidden)
        return GatedMlp(
            self._builder.prepare_linear("mlp.gate_up", gate_up, gate_up_bias),
            self._builder.prepare_linear("mlp.down", down, down_bias),
            spec.activation,
            self._builder.kernels,
        )

    def _linears(self, prefix: str, fused: str, sizes: dict[str, int], columns: int) -> list[StoredPart]:
        """Return the weights of one fused linear: one of each name [size, columns], or all of them in one."""
        return [self._weights.open_linear(name, (size, columns)) for name, size in self._names(prefix, fused, sizes)]

    def _biases(self, prefix: str, fused: str, sizes: dict[str, int]) -> list[Tensor]:
        """Return the biases [size] of one fused linear, likewise."""
        return [self._bias(name, size) for name, size in self._names(prefix, fused, sizes)]

    def _bias(self, module: str, size: int) -> Tensor:
        name = f"{module}.bias"
        if name in self._spec.absent_biases:
            return torch.zeros(size, dtype=self._builder.dtype, device=self._builder.torch_device)
        return self._weights.get(name, (size,))

    def _names(self, prefix: str, fused: str, sizes: dict[str, int]) -> list[tuple[str, int]]:
        """Return the stored linears of a fused one, and the rows of each."""
        names = {fused: sum(sizes.values())} if self._spec.fused_tensors else sizes
        return [(f"{prefix}.{name}", size) for name, size in names.items()]
