"""Qwen3.5 and 3.6 (Qwen Team, 2026): Qwen3_5ForCausalLM, with experts Qwen3_5MoeForCausalLM; Qwen3-Next (2025):
Qwen3NextForCausalLM.

As Qwen3, with weights of norms around 0, a rotary embedding of a part of each head, and a gate on the output of
attention. Three of four layers have the gated delta rule in the place of attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import MAX_LAYERS, absent, read_common, uniform_rope
from executor_svc.models.families.experts import count_from_0, read_router, sparse_layers, with_experts, without_experts
from executor_svc.models.families.recurrent import (
    ATTENTION,
    LINEAR_TYPES,
    RECURRENT,
    layer_kinds,
    read_gated_delta,
    with_recurrence,
)
from executor_svc.models.specs.file_form import QWEN_MTP_LAYERS_FIELD
from executor_svc.models.specs.recurrent_spec import DeltaNames
from executor_svc.models.specs.spec import DecoderSpec, ExpertNames, ExpertsSpec

_PART = 0.25
_INTERVAL = 4
_BY_KEY_HEAD = DeltaNames(into=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"))
_PARTLY_BY_KEY_HEAD = DeltaNames(
    into=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_ba"),
)
"""Of GGUF files."""
_NEXT: dict[str, Any] = {"norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10}
_MIXTURE: dict[str, Any] = {"num_experts": 256, "num_experts_per_tok": 8}
"""What transformers takes for fields that a config.json leaves out."""
QWEN_SHARED = ExpertNames(
    shared_into=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)


@absent(num_key_value_heads=4)
def read_qwen3_5(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _read(config, DeltaNames())


@absent(num_key_value_heads=2)
def read_qwen3_5_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(_MIXTURE | config)
    size = fields.integer("moe_intermediate_size", 512)
    spec = _read({"intermediate_size": size} | without_experts(config), DeltaNames())
    return with_experts(spec, _experts(fields, shares=True))


@absent(num_key_value_heads=2)
def read_qwen3_next(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    config = {QWEN_MTP_LAYERS_FIELD: 1} | config  # its files have a head that the published config.json does not name
    fields = Fields(_NEXT | config)
    split = fields.flag("has_split_projections", False)  # in GGUF files
    spec = _read(without_experts(config), _PARTLY_BY_KEY_HEAD if split else _BY_KEY_HEAD)
    if fields.get("num_experts") == 0:
        return spec
    return with_experts(spec, _experts(fields, fields.flag("norm_topk_prob", False)), sparse_layers(fields))


def _read(config: dict[str, Any], names: DeltaNames) -> DecoderSpec:
    """Return the parts that all of these families share, with an MLP in all layers."""
    fields, rotary = Fields(config), uniform_rope(partial=_PART, may_be_odd=True)
    spec = read_common(config, max_positions=32_768, head_size=256, read_rotary=rotary)
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", "is false: attention without a gate is not supported")
    interval, bias = fields.integer("full_attention_interval", _INTERVAL), fields.flag("attention_bias", False)

    def kind(layer: int) -> str:
        return RECURRENT if (layer + 1) % interval else ATTENTION

    more = min(count_from_0(fields, QWEN_MTP_LAYERS_FIELD, 0), MAX_LAYERS)  # of a head, which GGUF files have behind
    kinds = layer_kinds(fields, spec.num_layers, LINEAR_TYPES, kind)
    spec = replace(
        spec,
        qkv_bias=bias,
        output_bias=bias,
        head_norms="heads",
        norm_weight_offset=1.0,
        attention_gate=True,
        num_mtp_layers=more,
        ignored=("mtp.", "model.mtp.", *(f"model.layers.{spec.num_layers + layer}." for layer in range(more))),
    )
    if RECURRENT not in kinds:
        return spec
    return with_recurrence(spec, kinds, read_gated_delta(fields, spec.norm_eps, names))


def _experts(fields: Fields, shares: bool) -> ExpertsSpec:
    return ExpertsSpec(
        read_router(fields, weighing="shares" if shares else "scores"),
        fields.integer("moe_intermediate_size", 512),
        QWEN_SHARED,
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
    )
