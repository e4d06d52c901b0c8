"""Families with multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434), most of them mixtures of experts:
DeepseekV2ForCausalLM (V2, V2-Lite), DeepseekV3ForCausalLM (V3, R1, V3.1, Kimi K2), Glm4MoeLiteForCausalLM
(GLM-4.7-Flash) and Mistral4ForCausalLM (Mistral Small 4).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import rope_section, score_factor
from executor_svc.models.families.common import MAX_LAYERS, RopeReader, read_common, uniform_rope
from executor_svc.models.families.experts import (
    count_from_0,
    read_router,
    sigmoid_experts,
    with_experts,
    without_experts,
)
from executor_svc.models.families.mistral import scaling_rope
from executor_svc.models.specs.latent_spec import LatentSpec
from executor_svc.models.specs.spec import DecoderSpec, ExpertsSpec

_V2: dict[str, Any] = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}
_V3: dict[str, Any] = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
}
_GLM: dict[str, Any] = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "moe_intermediate_size": 1536,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}
_MISTRAL: dict[str, Any] = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
}
"""What transformers takes for fields that a config.json leaves out."""
_MISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Of a config.json without any."""
_INDEXERS = ("index_topk", "index_n_heads", "index_head_dim")


def read_deepseek_v2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    config = _with_defaults(config, _V2)
    fields = Fields(config)
    spec = read_latents(config, 2048, uniform_rope(rounding="sum"))
    method = fields.text("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", f"{brief(method)} is not supported; supported: greedy, group_limited_greedy")
    _check_scores(fields, "softmax")
    rules: dict[str, Any] = {"grouped": method != "greedy", "two_best": False, "factor": _factor(fields, 1.0)}
    router = read_router(fields, weighing="scores", rounded=False, **rules)
    size = fields.integer("moe_intermediate_size")
    shared = size * count_from_0(fields, "n_shared_experts", 2)
    return _sparse(spec, fields, ExpertsSpec(router, size, router_in_float32=True, shared_size=shared))


def read_deepseek_v3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    config = _with_defaults(config, _V3)
    fields = Fields(config)
    spec = with_heads_ignored(read_latents(config, 4096, uniform_rope()), fields)
    _check_noaux(fields)
    return _sparse(spec, fields, sigmoid_experts(fields))


def read_glm4_moe_lite(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    config = _with_defaults(config, _GLM)
    fields = Fields(config)
    spec = with_heads_ignored(read_latents(config, 202_752, uniform_rope(), eps=1e-5), fields)
    _check_noaux(fields)
    types = fields.get("mlp_layer_types")
    if types is None:
        return _sparse(spec, fields, sigmoid_experts(fields), dense=1)
    if not isinstance(types, list) or len(types) != spec.num_layers:
        raise fields.error("mlp_layer_types", f"must be a list with num_hidden_layers {spec.num_layers} entries")
    for kind in types:
        if kind not in ("dense", "sparse"):
            raise fields.error("mlp_layer_types", f"{brief(kind)} is not supported; supported: dense, sparse")
    return with_experts(spec, sigmoid_experts(fields), lambda layer: types[layer] == "dense")


def read_mistral4(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    config = _with_defaults(config, _MISTRAL)
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _MISTRAL_ROPE}
    fields = Fields(config)
    spec = read_latents(_with_own_share(config, fields), 1_048_576, scaling_rope)
    router = read_router(
        fields,
        grouped=True,
        rounded_scores=True,
        weighing="shares" if fields.flag("norm_topk_prob", True) else "scores",
        epsilon=1e-20,
        factor=_factor(fields, 1.0),
    )
    size = fields.integer("moe_intermediate_size")
    shared = size * count_from_0(fields, "n_shared_experts", 1)
    return _sparse(spec, fields, ExpertsSpec(router, size, shared_size=shared))


def _with_defaults(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with defaults; null is a value of q_lora_rank."""
    given = {name: value for name, value in config.items() if value is not None or name == "q_lora_rank"}
    return {"kv_lora_rank": 512, "q_lora_rank": 1536, **defaults, **given}


def _with_own_share(config: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the fields with a rotary embedding whose share of a head is left out: it is that of `qk_rope_head_dim`."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    section = fields.section(name)
    rope = fields.integer("qk_rope_head_dim", 64)
    size = rope + fields.integer("qk_nope_head_dim")
    if (share := section.optional_number("partial_rotary_factor")) is not None and int(size * min(share, 1.0)) != rope:
        raise section.error("partial_rotary_factor", f"{share:g} must be qk_rope_head_dim / head size, {rope / size:g}")
    content = config[name]
    return {**config, name: {key: value for key, value in content.items() if key != "partial_rotary_factor"}}


def read_latents(config: dict[str, Any], positions: int, rope: RopeReader, eps: float = 1e-6) -> DecoderSpec:
    """Return the parts that all of these families share, with an MLP in all layers."""
    fields = Fields(config)
    for name in _INDEXERS:
        fields.refuse(name, "attention to keys that an indexer chooses is not supported")
    fields.refuse("mlp_bias", "biases of the MLP are not supported")
    latent = LatentSpec(
        size=fields.integer("kv_lora_rank"),
        rope_size=fields.integer("qk_rope_head_dim", 64),
        nope_size=fields.integer("qk_nope_head_dim", 128),
        value_size=fields.integer("v_head_dim", 128),
        query_size=None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
    )
    if latent.rope_size % 2:
        raise fields.error("qk_rope_head_dim", f"{latent.rope_size} is odd; rotary embedding needs an even one")
    heads = fields.integer("num_attention_heads")
    fields.integer("num_key_value_heads", heads)  # checked alone: all heads read the latent
    dense = {**without_experts(config), "head_dim": latent.rope_size, "num_key_value_heads": heads}
    spec = read_common(dense, max_positions=positions, eps=eps, read_rotary=rope)
    bias = fields.flag("attention_bias", False)
    scale = score_factor(rope_section(fields)) / math.sqrt(latent.query_head)
    return replace(
        spec,
        num_kv_heads=1,
        head_size=latent.size + latent.rope_size,
        attention_scale=scale,
        layers=tuple(replace(layer, latent=latent) for layer in spec.layers),
        rotary_pairs=latent.rope_size if fields.flag("rope_interleave", True) else 0,
        qkv_bias=bias,
        output_bias=bias,
    )


def _sparse(spec: DecoderSpec, fields: Fields, experts: ExpertsSpec, dense: int = 0) -> DecoderSpec:
    """Return the spec with experts in the layers after the first ones; dense: how many by default."""
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", "other than 1 is not supported")
    first = count_from_0(fields, "first_k_dense_replace", dense)
    return with_experts(spec, experts, lambda layer: layer < first)


def _factor(fields: Fields, default: float) -> float:
    return fields.number("routed_scaling_factor", default)


def _check_scores(fields: Fields, wanted: str) -> None:
    scores = fields.text("scoring_func") or wanted
    if scores != wanted:
        raise fields.error("scoring_func", f"{brief(scores)} is not supported; supported: {wanted}")


def _check_noaux(fields: Fields) -> None:
    _check_scores(fields, "sigmoid")
    method = fields.text("topk_method") or "noaux_tc"
    if method != "noaux_tc":
        raise fields.error("topk_method", f"{brief(method)} is not supported; supported: noaux_tc")


def with_heads_ignored(spec: DecoderSpec, fields: Fields) -> DecoderSpec:
    """Return the spec without the layers that a head of multi-token prediction has behind the decoder's."""
    more = min(count_from_0(fields, "num_nextn_predict_layers", 1), MAX_LAYERS)
    return replace(spec, ignored=tuple(f"model.layers.{spec.num_layers + layer}." for layer in range(more)))
