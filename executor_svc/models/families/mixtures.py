"""Families whose layers have experts: each a dense family with a router (`device.experts.Router`) and names.

Qwen2-MoE and Qwen3-MoE (Yang et al., 2024, 2025), Qwen3-Next (Qwen Team, 2025), Mixtral (Jiang et al., 2024), OLMoE
(Muennighoff et al., 2024), GLM-4.5 (Z.ai, 2025), ERNIE 4.5 (Baidu, 2025), Granite 3 MoE (IBM, 2024), Hunyuan A13B
(Tencent, 2025), MiniMax M2 (MiniMax, 2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config_fields import Fields
from executor_svc.models.families.common import MAX_LAYERS, read_common, uniform_rope
from executor_svc.models.families.ernie import read_ernie_attention
from executor_svc.models.families.experts import (
    count_from_0,
    read_router,
    sigmoid_experts,
    sparse_layers,
    with_experts,
    without_experts,
)
from executor_svc.models.families.granite import read_granite
from executor_svc.models.families.hunyuan import read_hunyuan
from executor_svc.models.families.mistral import read_mistral
from executor_svc.models.families.qwen import read_qwen2, read_qwen3
from executor_svc.models.families.qwen3_5 import read_qwen3_5
from executor_svc.models.spec import DecoderSpec, ExpertNames, ExpertsSpec

_QWEN_SHARED = ExpertNames(
    shared_into=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
_W_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    into=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)
_GRANITE = ExpertNames(
    router="block_sparse_moe.router.layer",
    into=("block_sparse_moe.input_linear.{}",),
    down="block_sparse_moe.output_linear.{}",
)
_HUNYUAN = ExpertNames(
    router="mlp.gate.wg",
    shared_into=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)


def read_qwen2_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    shared = fields.integer("shared_expert_intermediate_size", 5632)
    spec = replace(read_qwen2(without_experts(config)), qkv_bias=fields.flag("qkv_bias", True))
    return _qwen(spec, fields, replace(_qwen_experts(fields, 1408), names=_QWEN_SHARED, shared_size=shared))


def read_qwen3_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    return _qwen(read_qwen3(without_experts(config)), fields, _qwen_experts(fields, 768))


def read_qwen3_next(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    defaults = {"norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10}
    fields, spec = Fields(defaults | config), read_qwen3_5(without_experts(config))
    if fields.get("num_experts") == 0:
        return spec
    shared = fields.integer("shared_expert_intermediate_size", 512)
    return _qwen(spec, fields, replace(_qwen_experts(fields, 512), names=_QWEN_SHARED, shared_size=shared))


def _qwen(spec: DecoderSpec, fields: Fields, experts: ExpertsSpec) -> DecoderSpec:
    return with_experts(spec, experts, sparse_layers(fields))


def _qwen_experts(fields: Fields, size: int) -> ExpertsSpec:
    shares = fields.flag("norm_topk_prob", False)
    router = read_router(fields, weighing="shares" if shares else "scores")
    return ExpertsSpec(router, fields.integer("moe_intermediate_size", size))


def read_mixtral(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec, fields = read_mistral({"sliding_window": None, **without_experts(config)}), Fields(config)
    router = read_router(fields, rounded=False)
    return with_experts(spec, ExpertsSpec(router, spec.intermediate_size, _W_NAMES))


def read_olmoe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    fields.refuse("clip_qkv", "clipped queries, keys and values are not supported")
    fields.refuse("attention_bias", "biases of attention are not supported")
    spec = read_common(without_experts(config), max_positions=4096, eps=1e-5)
    shares = fields.flag("norm_topk_prob", False)
    router = read_router(fields, weighing="shares" if shares else "scores")
    return with_experts(replace(spec, head_norms="all heads"), ExpertsSpec(router, spec.intermediate_size))


def read_glm4_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    rotary = uniform_rope(partial=0.5)
    spec = read_common(without_experts(config), max_positions=131_072, eps=1e-5, read_rotary=rotary)
    spec = replace(
        spec,
        qkv_bias=fields.flag("attention_bias", False),
        head_norms="heads" if fields.flag("use_qk_norm", False) else None,
    )
    more = count_from_0(fields, "num_nextn_predict_layers", 1)  # of a head of multi-token prediction
    ignored = tuple(f"model.layers.{spec.num_layers + layer}." for layer in range(min(more, MAX_LAYERS)))
    spec = replace(spec, ignored=ignored)
    num_dense = count_from_0(fields, "first_k_dense_replace", 1)
    return with_experts(spec, sigmoid_experts(fields), lambda layer: layer < num_dense)


def read_ernie_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields, spec = Fields(config), read_ernie_attention(without_experts(config), None)
    first, interval = count_from_0(fields, "moe_layer_start_index", 1), fields.integer("moe_layer_interval", 1)
    last = fields.get("moe_layer_end_index")
    end = spec.num_layers if last in (None, -1) else 1 + count_from_0(fields, "moe_layer_end_index", 27)
    size = fields.integer("moe_intermediate_size", 1536)
    experts = ExpertsSpec(
        read_router(fields, least_sum=fields.number("moe_norm_min", 1e-12)),
        size,
        ExpertNames(choice_bias="mlp.moe_statics.e_score_correction_bias", choice_bias_row=True),
        router_in_float32=True,
        shared_size=size * count_from_0(fields, "moe_num_shared_experts", 2),
    )
    return with_experts(spec, experts, lambda layer: not first <= layer < end or bool((layer + 1) % interval))


def read_granite_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec, fields = read_granite(without_experts(config)), Fields(config)
    router = read_router(fields, scores="logits", weighing="softmax")
    return with_experts(spec, ExpertsSpec(router, spec.intermediate_size, _GRANITE))


def read_hunyuan_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields, spec = Fields(config), read_hunyuan(without_experts(config))
    size = fields.integer("moe_intermediate_size", spec.intermediate_size)
    experts = ExpertsSpec(
        read_router(fields, rounded=False), size, _HUNYUAN, router_in_float32=True, shared_size=spec.intermediate_size
    )
    return with_experts(spec, experts)


def read_minimax_m2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    head = fields.integer("head_dim", 128)
    share = fields.integer("rotary_dim", head) / head
    rotary = uniform_rope(theta=5_000_000.0, partial=share)
    spec = read_common(without_experts(config), max_positions=196_608, head_size=128, read_rotary=rotary)
    router = read_router(fields, scores="sigmoid", rounded=False)
    names = replace(_W_NAMES, choice_bias="block_sparse_moe.e_score_correction_bias")
    spec = replace(spec, head_norms="all heads" if fields.flag("use_qk_norm", True) else None)
    return with_experts(spec, ExpertsSpec(router, spec.intermediate_size, names))
