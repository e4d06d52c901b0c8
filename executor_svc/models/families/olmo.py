"""OLMo 2 (Ai2, 2024, arXiv 2501.00656): Olmo2ForCausalLM; OLMo 3 (2025): Olmo3ForCausalLM.

Norms after attention and feed-forward and none before, and norms of all query heads together, and of all key heads.
OLMo 3 has a window in three of four layers, and scales the rotary embedding in the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import read_rope
from executor_svc.models.families.common import (
    RopeReader,
    layer_windows,
    optional_window,
    read_common,
    uniform_rope,
    with_windows,
)
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

NORMS_AFTER = LayerNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_POSITIONS, _THETA_3, _WINDOW = 2048, 500_000.0, 4096


def read_olmo2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read_olmo(config, uniform_rope(rounding="sum"))


def read_olmo3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec, fields = _read_olmo(config, _full_rope), Fields(config)
    local = _rope_of(fields, "sliding_attention", spec.head_size, fields.integer("max_position_embeddings", _POSITIONS))
    windows = layer_windows(fields, spec.num_layers, optional_window(fields, _WINDOW), lambda i: (i + 1) % 4 != 0)
    spec = with_windows(spec, windows)
    layers = (layer if layer.window is None else replace(layer, rope=local) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _read_olmo(config: dict[str, Any], read_rotary: RopeReader) -> DecoderSpec:
    bias = Fields(config).flag("attention_bias", False)
    return replace(
        read_common(config, max_positions=_POSITIONS, eps=1e-5, read_rotary=read_rotary),
        names=NORMS_AFTER,
        norms_in_fp32=True,
        head_norms="all heads",
        qkv_bias=bias,
        output_bias=bias,
    )


def _full_rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    return _rope_of(fields, "full_attention", head_size, max_positions)


def _rope_of(fields: Fields, layer_type: str, head_size: int, max_positions: int) -> RopeConfig:
    """Return the rotary embedding of a layer type: `rope_scaling` of older files is that of full attention alone."""
    by_type = fields.section("rope_parameters")
    if by_type.get("rope_type") or by_type.get("rope_theta"):
        raise fields.error("rope_parameters", "of OLMo 3 must have objects full_attention and sliding_attention")
    section = by_type.section(layer_type)
    if layer_type == "full_attention" and fields.get("rope_scaling"):
        section = fields.section("rope_scaling")
    theta = fields.number("rope_theta", _THETA_3)
    return read_rope(section, head_size, max_positions=max_positions, theta=theta, rounding="sum")
