"""The Llama family (Touvron et al., 2023; Llama 3): LlamaForCausalLM checkpoints of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor_svc.kernels.interface import AttentionPlan, AttentionShape, Linear
from executor_svc.layers.attention import Attention, fuse_qkv, pad_output
from executor_svc.layers.mlp import GatedMlp
from executor_svc.layers.rope import RotaryTables
from executor_svc.models.base import Builder, CausalLM, WeightSource
from executor_svc.models.llama_config import LlamaConfig, parse


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: GatedMlp


class LlamaForCausalLM:
    """Implements `models.base.CausalLM`. Rounds where transformers rounds, to stay close to it in bf16."""

    def __init__(self, config: LlamaConfig, max_model_len: int, weights: WeightSource, builder: Builder) -> None:
        """Load the weights layer by layer; linears are made ready at once, so that no second copy of them stays."""
        self._config = config
        self._builder = builder
        self._kernels = builder.kernels
        self.num_layers = config.num_layers
        self.vocab_size = config.vocab_size
        self.attention_shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            self._kernels.padded_head_size(config.head_size),
            config.head_size**-0.5,
        )
        self._rope = RotaryTables(config.rope, config.head_size, max_model_len, builder.dtype, builder.torch_device)
        self._embedding = weights.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [self._load_layer(i, weights) for i in range(config.num_layers)]
        self._norm = weights.get("model.norm.weight", (config.hidden_size,))
        head = self._embedding
        if not config.tied:
            head = weights.get("lm_head.weight", (config.vocab_size, config.hidden_size))
        self._lm_head = builder.prepare_linear("lm_head", head)

    def _load_layer(self, index: int, weights: WeightSource) -> _Layer:
        config, prefix = self._config, f"model.layers.{index}"
        hidden = (config.hidden_size,)
        return _Layer(
            input_norm=weights.get(f"{prefix}.input_layernorm.weight", hidden),
            attention=self._load_attention(f"{prefix}.self_attn", weights),
            post_norm=weights.get(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=GatedMlp(*self._load_mlp(f"{prefix}.mlp", weights), self._kernels),
        )

    def _load_attention(self, prefix: str, weights: WeightSource) -> Attention:
        config, shape = self._config, self.attention_shape
        sizes = {
            "q_proj": config.num_heads * config.head_size,
            "k_proj": config.num_kv_heads * config.head_size,
            "v_proj": config.num_kv_heads * config.head_size,
        }
        hidden = config.hidden_size
        qkv = fuse_qkv([weights.get(f"{prefix}.{name}.weight", (size, hidden)) for name, size in sizes.items()], shape)
        output = weights.get(f"{prefix}.o_proj.weight", (hidden, sizes["q_proj"]))
        qkv_bias = output_bias = None
        if config.attention_bias:
            qkv_bias = fuse_qkv([weights.get(f"{prefix}.{name}.bias", (size,)) for name, size in sizes.items()], shape)
            output_bias = weights.get(f"{prefix}.o_proj.bias", (hidden,))
        return Attention(
            shape,
            self._builder.prepare_linear("attention.qkv", qkv, qkv_bias),
            self._builder.prepare_linear("attention.output", pad_output(output, shape), output_bias),
            self._kernels,
        )

    def _load_mlp(self, prefix: str, weights: WeightSource) -> tuple[Linear, Linear]:
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        names = ("gate_proj", "up_proj")
        gate_up = torch.cat([weights.get(f"{prefix}.{name}.weight", (inner, hidden)) for name in names])
        down = weights.get(f"{prefix}.down_proj.weight", (hidden, inner))
        gate_up_bias = down_bias = None
        if self._config.mlp_bias:
            gate_up_bias = torch.cat([weights.get(f"{prefix}.{name}.bias", (inner,)) for name in names])
            down_bias = weights.get(f"{prefix}.down_proj.bias", (hidden,))
        return (
            self._builder.prepare_linear("mlp.gate_up", gate_up, gate_up_bias),
            self._builder.prepare_linear("mlp.down", down, down_bias),
        )

    def forward(self, token_ids: Tensor, positions: Tensor, kv_layers: Sequence[Tensor], plan: AttentionPlan) -> Tensor:
        """Return hidden states [T, hidden] before the final norm for token_ids and positions [T] int64."""
        kernels, eps = self._kernels, self._config.rms_norm_eps
        rope = self._rope.at(positions)
        residual = self._embedding.index_select(0, token_ids)
        delta: Tensor | None = None
        for layer, kv_layer in zip(self._layers, kv_layers, strict=True):
            if delta is None:
                normed = kernels.rms_norm(residual, layer.input_norm, eps)
            else:
                normed, residual = kernels.add_rms_norm(delta, residual, layer.input_norm, eps)
            attended = layer.attention(normed, rope, kv_layer, plan)
            normed, residual = kernels.add_rms_norm(attended, residual, layer.post_norm, eps)
            delta = layer.mlp(normed)
        return residual if delta is None else residual.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab_size] in the model's dtype for hidden [R, hidden], R at least two."""
        return self._lm_head(self._kernels.rms_norm(hidden, self._norm, self._config.rms_norm_eps))


class LlamaArchitecture:
    """Implements `models.base.Architecture`."""

    def max_positions(self, config: dict[str, Any]) -> int:
        """Return max_position_embeddings, times the factor where positions are divided by it (as vLLM does)."""
        parsed = parse(config)
        factor = parsed.rope.factor if parsed.rope.rope_type == "linear" else 1.0
        return int(parsed.max_positions * factor)

    def sizes(self, config: dict[str, Any]) -> dict[str, int]:
        parsed = parse(config)
        names = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size")
        return {name: getattr(parsed, name) for name in names}

    def build(self, config: dict[str, Any], max_model_len: int, weights: WeightSource, builder: Builder) -> CausalLM:
        return LlamaForCausalLM(parse(config), max_model_len, weights, builder)

    def ignored_tensors(self, config: dict[str, Any]) -> tuple[str, ...]:
        ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
        return (*ignored, "lm_head.weight") if parse(config).tied else ignored
