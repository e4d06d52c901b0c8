"""Granite 3 (IBM, 2024), dense: GraniteForCausalLM. Llama with multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config_fields import Fields
from executor_svc.models.families.llama import read_llama
from executor_svc.models.spec import DecoderSpec


def read_granite(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    return replace(
        read_llama(config),
        embedding_scale=fields.number("embedding_multiplier", 1.0, at_least=0),
        attention_scale=fields.number("attention_multiplier", 1.0, at_least=0),
        residual_scale=fields.number("residual_multiplier", 1.0, at_least=0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
