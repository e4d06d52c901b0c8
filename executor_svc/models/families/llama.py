"""Llama (Touvron et al., 2023; Llama 2 and 3): LlamaForCausalLM.

Of the same parts: Seed-OSS (ByteDance, 2025): SeedOssForCausalLM, with biases of its own choice; SmolLM3 (Hugging Face,
2025): SmolLM3ForCausalLM, without a rotary embedding in some layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import (
    MAX_LAYERS,
    absent,
    layer_windows,
    optional_window,
    read_common,
    rotated_where,
    uniform_rope,
    with_windows,
)
from executor_svc.models.specs.spec import DecoderSpec


def read_llama(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    return replace(
        read_common(config, max_positions=2048),
        qkv_bias=fields.flag("qkv_bias", bias),  # as vLLM reads it
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


@absent(num_key_value_heads=8)
def read_seed_oss(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    return replace(
        read_common(config, max_positions=524_288, head_size=128),
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


@absent(num_key_value_heads=4)
def read_smollm3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    spec = replace(
        read_common(config, max_positions=32_768, tied=True, read_rotary=uniform_rope(theta=2_000_000.0)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    rotated = _rotated_layers(fields, spec.num_layers)
    window = optional_window(fields, None) if fields.flag("use_sliding_window", False) else None
    windows: list[int | None] = [None] * spec.num_layers
    if window is not None:
        windows = layer_windows(fields, spec.num_layers, window, lambda i: not rotated[i])
    return rotated_where(with_windows(spec, windows), rotated)


def _rotated_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Return for each layer whether `no_rope_layers` has a 1, which says that it has a rotary embedding."""
    listed = fields.get("no_rope_layers")
    if not listed:
        every = fields.integer("no_rope_layer_interval", 4, at_most=MAX_LAYERS)
        return [(i + 1) % every != 0 for i in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(each not in (0, 1) for each in listed):
        raise fields.error("no_rope_layers", f"must be a list of 0 and 1 for num_hidden_layers {num_layers} layers")
    return [bool(each) for each in listed[:num_layers]]
