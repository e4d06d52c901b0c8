"""Hunyuan (Tencent, 2025), dense: HunYuanDenseV1ForCausalLM.

Llama with norms of heads after the rotary embedding, whose theta may be stretched by a fixed factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import DEFAULT_THETA, rope_section
from executor_svc.models.families.common import read_common, uniform_rope
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.specs.spec import DecoderSpec, LayerNames
from executor_svc.portable_math import power

_MOST_ALPHA = 1e9
_NAMES = LayerNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def read_hunyuan(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    fields.refuse("use_cla", "attention across layers is not supported")
    if config.get("num_experts") == 1:  # dense models say so
        config = {**config, "num_experts": None, "num_experts_per_tok": None}
    bias = fields.flag("attention_bias", False)
    return replace(
        read_common(config, max_positions=2048, eps=1e-5, read_rotary=_rope),
        names=_NAMES,
        head_norms="heads after rope" if fields.flag("use_qk_norm", True) else None,
        qkv_bias=bias,
        output_bias=bias,
    )


def _rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    """Return the rotary embedding; type `dynamic` with `alpha` is theta * alpha^(D / (D - 2)), whatever the length."""
    section = rope_section(fields)
    kind = section.text("rope_type") or section.text("type")
    if kind != "dynamic" or not section.get("alpha"):
        return uniform_rope()(fields, head_size, max_positions)
    if head_size < 4:
        raise fields.error("head_dim", f"{head_size} must be at least 4 with rope_type 'dynamic'")
    theta = section.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    alpha = section.number("alpha")
    if not 1 / _MOST_ALPHA <= alpha <= _MOST_ALPHA:
        raise section.error("alpha", f"{alpha:g} must be {1 / _MOST_ALPHA:g} to {_MOST_ALPHA:g}")
    stretched = power(alpha, np.asarray([head_size / (head_size - 2)]))
    theta *= float(stretched[0])
    if not 1 < theta < float("inf"):
        raise section.error("alpha", f"{alpha:g} gives a theta of {theta:g}")
    return RopeConfig(theta, head_size)
