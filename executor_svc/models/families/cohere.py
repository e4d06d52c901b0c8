"""Command R7B and Command A (Cohere, 2024, 2025): Cohere2ForCausalLM.

Attention and feed-forward read one norm of mean and variance, beside each other. Layers with a window rotate
neighbouring columns; the others, every fourth, have no rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import (
    MAX_LAYERS,
    layer_windows,
    optional_window,
    read_common,
    rotated_where,
    uniform_rope,
    with_windows,
)
from executor_svc.models.families.glm4 import with_pairs
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_WINDOW = 4096
_LEAST_SCALE = 1e-6
"""Of logits: one over it is a number."""


def read_cohere2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    for name, value in (("use_qk_norm", False), ("use_parallel_block", True), ("use_gated_activation", True)):
        if fields.flag(name, value) is not value:
            raise fields.error(name, f"must be {str(value).lower()}: the model has no other form")
    spec = read_common(
        {**config, "head_dim": None},  # transformers takes that of hidden_size
        max_positions=8192,
        eps=1e-5,
        eps_field="layer_norm_eps",
        tied=True,
        read_rotary=uniform_rope(rounding="angles and sum"),
    )
    bias, every = fields.flag("attention_bias", False), fields.integer("sliding_window_pattern", 4, at_most=MAX_LAYERS)
    windows = layer_windows(fields, spec.num_layers, optional_window(fields, _WINDOW), lambda i: (i + 1) % every != 0)
    spec = replace(
        with_pairs(with_windows(spec, windows)),
        names=LayerNames(before_mlp=None),
        norm="layer",
        parallel=True,
        qkv_bias=bias,
        output_bias=bias,
        logits_divisor=1 / fields.number("logit_scale", 0.0625, at_least=_LEAST_SCALE),
    )
    return rotated_where(spec, [window is not None for window in windows])
