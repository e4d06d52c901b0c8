"""Families whose layers have experts: each a dense family with a router (`device.experts.Router`) and names.

Qwen2-MoE and Qwen3-MoE (Yang et al., 2024, 2025), Mixtral (Jiang et al., 2024), OLMoE
(Muennighoff et al., 2024), GLM-4.5 (Z.ai, 2025), ERNIE 4.5 (Baidu, 2025), Granite 3 MoE and 4.0 swash (IBM, 2024,
2026), Hunyuan A13B (Tencent, 2025), MiniMax M2 (MiniMax, 2025), K-EXAONE (LG AI Research, 2026).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import (
    MAX_LAYERS,
    absent,
    optional_window,
    read_common,
    uniform_rope,
    with_windows,
)
from executor_svc.models.families.ernie import read_ernie_attention
from executor_svc.models.families.exaone import read_exaone4
from executor_svc.models.families.experts import (
    alike_in_layers,
    by_layer,
    count_from_0,
    read_router,
    sigmoid_experts,
    sparse_layers,
    with_experts,
    without_experts,
)
from executor_svc.models.families.granite import read_granite, read_granite_swa
from executor_svc.models.families.hunyuan import read_hunyuan
from executor_svc.models.families.mistral import read_mistral
from executor_svc.models.families.phi3 import W_NAMES
from executor_svc.models.families.qwen import read_qwen2, read_qwen3
from executor_svc.models.families.qwen3_5 import QWEN_SHARED
from executor_svc.models.specs.spec import DecoderSpec, ExpertNames, ExpertsSpec, LayerNames

GRANITE = ExpertNames(
    router="block_sparse_moe.router",
    into=("block_sparse_moe.experts.{}.gate_proj", "block_sparse_moe.experts.{}.up_proj"),
    down="block_sparse_moe.experts.{}.down_proj",
    shared_into=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
    renamed=(
        ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ),
)
_HUNYUAN = ExpertNames(
    router="mlp.gate.wg",
    shared_into=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)
_SWA: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_key_value_heads": None,
}
"""What transformers takes for fields that a config.json leaves out, where dense models have other values."""
_HUNYUAN_LISTS = "num_experts", "moe_intermediate_size", "num_shared_expert"
"""Fields that are lists with a number for each layer in the files of A13B, as `moe_topk` is."""


def read_qwen2_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    shared = fields.integer("shared_expert_intermediate_size", 5632)
    spec = read_qwen2(without_experts(config), lambda layer, most: layer % 2 == 0 and layer < most)
    spec = replace(spec, qkv_bias=fields.flag("qkv_bias", True))
    return _qwen(spec, fields, replace(_qwen_experts(fields, 1408, (60, 4)), names=QWEN_SHARED, shared_size=shared))


@absent(num_key_value_heads=4)
def read_qwen3_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    spec = read_qwen3({**without_experts(config), "use_sliding_window": None, "layer_types": None})
    if fields.flag("use_sliding_window", False):  # of all layers, where dense models have it in the last ones
        spec = with_windows(spec, [optional_window(fields, 4096)] * spec.num_layers)
    return _qwen(spec, fields, _qwen_experts(fields, 768, (128, 8)))


def _qwen(spec: DecoderSpec, fields: Fields, experts: ExpertsSpec) -> DecoderSpec:
    return with_experts(spec, experts, sparse_layers(fields))


def _qwen_experts(fields: Fields, size: int, usual: tuple[int, int]) -> ExpertsSpec:
    shares = fields.flag("norm_topk_prob", False)
    router = read_router(fields, usual=usual, weighing="shares" if shares else "scores")
    return ExpertsSpec(router, fields.integer("moe_intermediate_size", size))


@absent(rms_norm_eps=1e-5, rope_theta=1_000_000.0)
def read_mixtral(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec, fields = read_mistral({"sliding_window": None, **without_experts(config)}), Fields(config)
    router = read_router(fields, usual=(8, 2), rounded=False)
    return with_experts(spec, ExpertsSpec(router, spec.intermediate_size, W_NAMES))


def read_olmoe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    fields.refuse("clip_qkv", "clipped queries, keys and values are not supported")
    bias = fields.flag("attention_bias", False)
    spec = read_common(without_experts(config), max_positions=4096, eps=1e-5)
    spec = replace(spec, head_norms="all heads", qkv_bias=bias, output_bias=bias)
    shares = fields.flag("norm_topk_prob", False)
    router = read_router(fields, usual=(64, 8), weighing="shares" if shares else "scores")
    return with_experts(spec, ExpertsSpec(router, spec.intermediate_size))


@absent(num_key_value_heads=8)
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
    return with_experts(spec, sigmoid_experts(fields, (128, 8)), lambda layer: layer < num_dense)


def read_exaone_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields, spec = Fields(config), replace(read_exaone4(without_experts(config)), names=LayerNames(), ignored=("mtp.",))
    given = {"moe_intermediate_size": 1024, "routed_scaling_factor": 2.5} | config
    experts = sigmoid_experts(Fields(given, names={"n_shared_experts": "num_shared_experts"}), (64, 8))
    kinds, num_dense = fields.get("mlp_layer_types"), count_from_0(fields, "first_k_dense_replace", 1)
    if kinds is None:
        return with_experts(spec, experts, lambda layer: layer < num_dense)
    if not isinstance(kinds, list) or len(kinds) != spec.num_layers or set(map(str, kinds)) - {"dense", "sparse"}:
        raise fields.error(
            "mlp_layer_types", f"must be a list of dense and sparse with num_hidden_layers {spec.num_layers} entries"
        )
    return with_experts(spec, experts, lambda layer: kinds[layer] == "dense")


@absent(num_key_value_heads=4)
def read_ernie_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields, spec = Fields(config), read_ernie_attention(without_experts(config))
    first, interval = count_from_0(fields, "moe_layer_start_index", 1), fields.integer("moe_layer_interval", 1)
    last = fields.get("moe_layer_end_index")
    end = spec.num_layers if last in (None, -1) else 1 + count_from_0(fields, "moe_layer_end_index", 27)
    size = fields.integer("moe_intermediate_size", 1536)
    experts = ExpertsSpec(
        read_router(fields, usual=(64, 6), least_sum=fields.number("moe_norm_min", 1e-12)),
        size,
        ExpertNames(choice_bias="mlp.moe_statics.e_score_correction_bias", choice_bias_row=True),
        router_in_float32=True,
        shared_size=size * count_from_0(fields, "moe_num_shared_experts", 2),
        shared_biased=spec.mlp_bias,
    )
    # Ignored: a head of multi-token prediction.
    spec = replace(spec, head_bias=spec.mlp_bias, ignored=("model.mtp_",))
    return with_experts(spec, experts, lambda layer: not first <= layer < end or bool((layer + 1) % interval))


def read_granite_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _granite(read_granite(without_experts(config)), Fields(config))


def read_granite_moe_swa(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return _granite(read_granite_swa({**_SWA, **without_experts(config)}), Fields(config))


def _granite(spec: DecoderSpec, fields: Fields) -> DecoderSpec:
    router = read_router(fields, usual=(8, 2), scores="logits", weighing="softmax")
    shared, names = count_from_0(fields, "shared_intermediate_size", 0), GRANITE
    if fields.flag("has_split_shared_mlp", False):  # in GGUF files
        into = "shared_mlp.gate_proj", "shared_mlp.up_proj"
        names = replace(names, shared_into=into, shared_down="shared_mlp.down_proj")
    return with_experts(spec, ExpertsSpec(router, spec.intermediate_size, names, shared_size=shared))


def read_hunyuan_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec = read_hunyuan(without_experts(config))
    fields = alike_in_layers(config, _HUNYUAN_LISTS, spec.num_layers)
    routers = [read_router(each, usual=(1, 1), rounded=False) for each in by_layer(fields, "moe_topk", spec.num_layers)]
    experts = ExpertsSpec(
        routers[0],
        fields.integer("moe_intermediate_size", spec.intermediate_size),
        _HUNYUAN,
        router_in_float32=True,
        shared_size=spec.intermediate_size * fields.integer("num_shared_expert", 1),
    )
    pairs = zip(spec.layers, routers, strict=True)
    return replace(spec, layers=tuple(replace(layer, experts=replace(experts, router=own)) for layer, own in pairs))


@absent(num_key_value_heads=8)
def read_minimax_m2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    head = fields.integer("head_dim", 128)
    share = fields.integer("rotary_dim", head) / head
    rotary = uniform_rope(theta=5_000_000.0, partial=share)
    spec = read_common(without_experts(config), max_positions=196_608, head_size=128, read_rotary=rotary)
    router = read_router(fields, usual=(256, 8), scores="sigmoid", rounded=False)
    names = replace(W_NAMES, choice_bias="block_sparse_moe.e_score_correction_bias")
    spec = replace(spec, head_norms="all heads" if fields.flag("use_qk_norm", True) else None)
    return with_experts(spec, ExpertsSpec(router, spec.intermediate_size, names))
