"""MiMo (Xiaomi, 2025, arXiv 2505.07608), dense: MiMoForCausalLM.

Qwen2's decoder, and in the same checkpoint a head of multi-token prediction, which `models.heads.mtp` runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import MAX_LAYERS
from executor_svc.models.families.qwen import read_qwen2
from executor_svc.models.specs.spec import MTP_LAYERS_FIELD, DecoderSpec


def read_mimo(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    if not fields.flag("attention_bias", True):
        raise fields.error("attention_bias", "is false: MiMo has biases on q, k and v")
    fields.refuse("use_mrope", "rotary embeddings of images are not supported")
    has_head = fields.get(MTP_LAYERS_FIELD) not in (None, 0)
    num_mtp_layers = fields.integer(MTP_LAYERS_FIELD, at_most=MAX_LAYERS) if has_head else 0
    return replace(read_qwen2(config), num_mtp_layers=num_mtp_layers)
