"""Gemma 2 (Gemma Team, 2024): Gemma2ForCausalLM; Gemma 3 (2025), text only: Gemma3ForCausalLM.

Both have norms before and after attention and feed-forward, a scaled embedding, and layers with a window between layers
with full attention. Gemma 2 caps attention scores and logits. Gemma 3 normalizes heads, and its layers with a window
have a separate rotary embedding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import read_rope
from executor_svc.models.families.common import (
    RopeReader,
    absent,
    layer_windows,
    optional_window,
    read_common,
    with_windows,
)
from executor_svc.models.layers.mlp import Activation
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

SANDWICHED = LayerNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_POSITIONS_2, _POSITIONS_3 = 8192, 131_072
_WINDOW = 4096
_HEAD_SIZE = 256
_QUERY_SCALAR = 256.0
GELU: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}
_FULL_THETA, _WINDOW_THETA = 1_000_000.0, 10_000.0


@absent(num_key_value_heads=4)
def read_gemma2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec, fields = _read_gemma(config, _POSITIONS_2, None), Fields(config)
    return replace(
        _windowed(fields, spec, every=2),
        attention_softcap=read_softcap(fields, "attn_logit_softcapping", 50.0),
        logits_softcap=read_softcap(fields, "final_logit_softcapping", 30.0),
    )


@absent(num_key_value_heads=4)
def read_gemma3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec, fields = _read_gemma(config, _POSITIONS_3, _full_rope), Fields(config)
    fields.refuse("attn_logit_softcapping", "Gemma 3 has no softcap in attention")
    positions = fields.integer("max_position_embeddings", _POSITIONS_3)
    local = _rope_of(fields, "sliding_attention", spec.head_size, positions, "rope_local_base_freq", _WINDOW_THETA)
    spec = _windowed(fields, spec, every=fields.integer("sliding_window_pattern", 6))
    return replace(
        spec,
        layers=tuple(layer if layer.window is None else replace(layer, rope=local) for layer in spec.layers),
        context_limit=positions,  # already the extended length
        head_norms="heads",
        logits_softcap=read_softcap(fields, "final_logit_softcapping", None),
    )


def _read_gemma(config: dict[str, Any], max_positions: int, read_rotary: RopeReader | None) -> DecoderSpec:
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    spec = read_common(
        config,
        max_positions=max_positions,
        head_size=_HEAD_SIZE,
        tied=True,
        read_rotary=read_rotary,
        activation=("hidden_activation", "gelu_pytorch_tanh", GELU),
    )
    return replace(
        spec,
        qkv_bias=bias,
        output_bias=bias,
        names=SANDWICHED,
        norm_weight_offset=1.0,
        attention_scale=1 / math.sqrt(fields.number("query_pre_attn_scalar", _QUERY_SCALAR)),
        embedding_scale=math.sqrt(spec.hidden_size),
        embedding_scale_rounded=True,
    )


def _windowed(fields: Fields, spec: DecoderSpec, every: int) -> DecoderSpec:
    """Return the spec with a window in the layers of layer_types, or in all layers except every `every`-th."""
    windows = layer_windows(fields, spec.num_layers, optional_window(fields, _WINDOW), lambda i: (i + 1) % every != 0)
    return with_windows(spec, windows)


def read_softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """Return a cap; null: no cap; absent: the family's default."""
    return fields.optional_number(name) if fields.has(name) else default


def _full_rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    return _rope_of(fields, "full_attention", head_size, max_positions, "rope_theta", _FULL_THETA)


def _rope_of(
    fields: Fields, layer_type: str, head_size: int, max_positions: int, theta: str, default: float
) -> RopeConfig:
    """Return the rotary embedding of a layer type.

    transformers 5 has an object for each type in `rope_parameters`. Older checkpoints have `rope_scaling` for full
    attention and a field for theta per type.
    """
    by_type = fields.section("rope_parameters")
    if by_type.get("rope_type") or by_type.get("rope_theta"):
        raise fields.error("rope_parameters", "of Gemma 3 must have objects full_attention and sliding_attention")
    section = by_type.section(layer_type)
    if layer_type == "full_attention" and fields.get("rope_scaling"):
        section = fields.section("rope_scaling")
    return read_rope(section, head_size, max_positions=max_positions, theta=fields.number(theta, default))
