"""Llama (Touvron et al., 2023; Llama 2 and 3): LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config_fields import Fields
from executor_svc.models.families.common import read_common
from executor_svc.models.spec import DecoderSpec


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
