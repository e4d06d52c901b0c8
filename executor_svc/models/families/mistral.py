"""Mistral (Jiang et al., 2023): MistralForCausalLM. Llama with a sliding window in all layers.

Ministral 3 (2025): Ministral3ForCausalLM, whose queries are scaled by position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import rope_section
from executor_svc.models.families.common import absent, optional_window, read_common, uniform_rope, with_windows
from executor_svc.models.layers.rope import QueryScaling, RopeConfig
from executor_svc.models.layers.rope_scaling import DynamicScaling
from executor_svc.models.specs.spec import DecoderSpec

_WINDOW = 4096
_MOST_BETA = 1e6
_MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Of a config.json without any."""


@absent(num_key_value_heads=8)
def read_mistral(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    fields.refuse("layer_types", "all layers of a Mistral model are alike")
    spec = read_common(config, max_positions=131_072)
    return with_windows(spec, [optional_window(fields, _WINDOW)] * spec.num_layers)


@absent(num_key_value_heads=8)
def read_ministral3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _MINISTRAL_ROPE}
    fields = Fields(config)
    fields.refuse("layer_types", "all layers of a Ministral 3 model are alike")
    spec = read_common(config, max_positions=262_144, head_size=128, eps=1e-5, read_rotary=scaling_rope)
    return with_windows(spec, [optional_window(fields, None)] * spec.num_layers)


def scaling_rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    """Return a rotary embedding with queries that are scaled by position, if config.json says so."""
    rope, section = uniform_rope()(fields, head_size, max_positions), rope_section(fields)
    beta = section.number("llama_4_scaling_beta", 0.0, at_least=0.0)
    if not beta:
        return rope
    if beta > _MOST_BETA:
        raise section.error("llama_4_scaling_beta", f"{beta:g} must be at most {_MOST_BETA:g}")
    if isinstance(rope.scaling, DynamicScaling):
        raise section.error("llama_4_scaling_beta", "is not supported with rope_type 'dynamic'")
    return replace(rope, query_scaling=QueryScaling(beta, section.integer("original_max_position_embeddings")))
