"""Granite 3 (IBM, 2024), dense: GraniteForCausalLM. Llama with multipliers.

Granite 4.0 (2025), of attention layers alone and without experts: GraniteMoeHybridForCausalLM. Granite 4.0 swash:
GraniteSWAForCausalLM, with sinks, windows in three of four layers, and a theta of each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config_fields import Fields, is_number
from executor_svc.models.families.common import layer_windows, optional_window, rotated_where, with_windows
from executor_svc.models.families.llama import read_llama
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.spec import DecoderSpec, LayerNames

_WINDOW = 128
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


def read_granite_swa(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    spec = read_llama({"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **config})
    windows = layer_windows(fields, spec.num_layers, optional_window(fields, _WINDOW), lambda i: i % 4 != 0)
    spec = with_windows(spec, windows)
    layers = (
        replace(layer, sinks=True, rope=_with_theta(layer.rope, theta))
        for layer, theta in zip(spec.layers, _thetas(fields, spec.num_layers), strict=True)
    )
    return _multiplied(replace(spec, layers=tuple(layers)), fields)


def _thetas(fields: Fields, num_layers: int) -> list[float | None]:
    """Return the theta of each layer, 0: it has no rotary embedding, None: the model's."""
    thetas = fields.get("layer_rope_theta")
    if thetas is None:
        return [None] * num_layers
    if not isinstance(thetas, list) or len(thetas) != num_layers:
        shown = f"{len(thetas)} entries" if isinstance(thetas, list) else brief(thetas)
        raise fields.error(
            "layer_rope_theta", f"must be a list with num_hidden_layers {num_layers} entries, not {shown}"
        )
    if wrong := [each for each in thetas if each != 0 and not (is_number(each) and each > 1)]:
        raise fields.error("layer_rope_theta", f"must be a list of numbers above 1, or 0, not {brief(wrong[0])}")
    return [float(each) for each in thetas]


def _with_theta(rope: RopeConfig | None, theta: float | None) -> RopeConfig | None:
    if rope is None or theta is None:
        return rope
    return replace(rope, theta=theta) if theta else None


def _multiplied(spec: DecoderSpec, fields: Fields) -> DecoderSpec:
    return replace(
        spec,
        embedding_scale=fields.number("embedding_multiplier", 1.0, at_least=0),
        attention_scale=fields.number("attention_multiplier", 1.0, at_least=0),
        residual_scale=fields.number("residual_multiplier", 1.0, at_least=0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
