"""Granite 3 (IBM, 2024), dense: GraniteForCausalLM. Llama with multipliers.

Granite 4.0 swash (2026): GraniteSWAForCausalLM, with sinks, windows in three of four layers, and a theta of each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields, is_number
from executor_svc.models.families.common import absent, layer_windows, optional_window, with_windows
from executor_svc.models.families.llama import read_llama
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.specs.spec import DecoderSpec

_WINDOW = 128


def read_granite(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return multiplied(read_llama(config), Fields(config))


@absent(num_key_value_heads=4)
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
    return multiplied(replace(spec, layers=tuple(layers)), fields)


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


def multiplied(spec: DecoderSpec, fields: Fields) -> DecoderSpec:
    """Return the spec with Granite's factors."""
    return replace(
        spec,
        embedding_scale=fields.number("embedding_multiplier", 1.0, at_least=0),
        attention_scale=fields.number("attention_multiplier", 1.0, at_least=0),
        residual_scale=fields.number("residual_multiplier", 1.0, at_least=0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
