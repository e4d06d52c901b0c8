"""Granite 3 (IBM, 2024), dense: GraniteForCausalLM. Llama with multipliers.

Granite 4.0 (2025), of attention layers alone and without experts: GraniteMoeHybridForCausalLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config_fields import Fields
from executor_svc.models.families.common import rotated_where
from executor_svc.models.families.llama import read_llama
from executor_svc.models.spec import DecoderSpec, LayerNames

_NAMES_4 = LayerNames(into_mlp=("shared_mlp.input_linear",), down="shared_mlp.output_linear")


def read_granite(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _multiplied(read_llama(config), Fields(config))


def read_granite_4(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    if not isinstance(kinds, list) or any(kind not in ("attention", "full_attention") for kind in kinds):
        raise fields.error("layer_types", f"is {brief(kinds)}: only layers of attention are supported")
    if len(kinds) != fields.integer("num_hidden_layers"):
        raise fields.error("layer_types", f"has {len(kinds)} entries, not num_hidden_layers of them")
    fields.refuse("num_local_experts", "mixtures of experts are not supported")
    sizes = {"intermediate_size": fields.integer("shared_intermediate_size", 1024)}
    without = {"num_experts_per_tok": None, "mlp_bias": None}  # of experts, and of no linear here
    spec = replace(read_llama({**config, **sizes, **without}), names=_NAMES_4)
    is_rotated = fields.text("position_embedding_type") == "rope"
    return _multiplied(rotated_where(spec, [is_rotated] * spec.num_layers), fields)


def _multiplied(spec: DecoderSpec, fields: Fields) -> DecoderSpec:
    return replace(
        spec,
        embedding_scale=fields.number("embedding_multiplier", 1.0, at_least=0),
        attention_scale=fields.number("attention_multiplier", 1.0, at_least=0),
        residual_scale=fields.number("residual_multiplier", 1.0, at_least=0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
