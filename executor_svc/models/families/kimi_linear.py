"""Kimi Linear (Moonshot AI, 2025, arXiv 2510.26692): KimiLinearForCausalLM.

As DeepSeek-V3, without rotary embedding, and with Kimi delta attention in the place of latent attention in three of
four layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import uniform_rope
from executor_svc.models.families.deepseek import read_latents, with_heads_ignored
from executor_svc.models.families.experts import count_from_0, sigmoid_experts, with_experts
from executor_svc.models.families.phi3 import W_NAMES
from executor_svc.models.families.recurrent import (
    ATTENTION,
    LINEAR_TYPES,
    MOST_HEADS,
    MOST_SIZE,
    RECURRENT,
    layer_kinds,
    taps,
    with_recurrence,
)
from executor_svc.models.specs.recurrent_spec import DeltaNames, GatedDeltaSpec
from executor_svc.models.specs.spec import DecoderSpec, LayerNames
from executor_svc.plan.state_sizes import DeltaState

_FIELDS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "routed_scaling_factor": 2.446,
    "moe_intermediate_size": 1024,
}
"""What transformers takes for fields that a config.json leaves out."""
_EXPERTS = replace(
    W_NAMES,
    choice_bias="block_sparse_moe.gate.e_score_correction_bias",
    shared_into=("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
    shared_down="block_sparse_moe.shared_experts.down_proj",
)
_NAMES = LayerNames(
    renamed=tuple(  # of layers without experts, as transformers writes them
        (f"block_sparse_moe.{name}_proj.weight", f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")
    ),
)
_DELTA = DeltaNames(
    into=(*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "b", "f_a", "g_a")),),
    low_rank=("self_attn.f_b_proj", "self_attn.g_b_proj"),
    conv=("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
    decay="self_attn.A_log",
    ready_decay="self_attn.A",
    dt_bias="self_attn.dt_bias",
    norm="self_attn.o_norm",
    output="self_attn.o_proj",
)


def read_kimi_linear(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    config = _DEFAULTS | config
    fields = Fields(config, names=_FIELDS)
    _refuse_others(fields)
    positions = fields.integer("max_position_embeddings", 1_048_576)
    latents = config | {"max_position_embeddings": positions, "rope_interleave": False}
    spec = read_latents(latents, positions, uniform_rope(), eps=1e-5)
    spec = replace(spec, names=_NAMES, layers=tuple(replace(layer, rope=None) for layer in spec.layers))
    spec = with_heads_ignored(spec, fields)
    dense = _dense_layers(fields, spec.num_layers)
    experts = replace(sigmoid_experts(fields, (256, 8)), names=_EXPERTS)
    spec = with_experts(spec, experts, lambda layer: layer in dense)
    kinds = _kinds(fields, spec.num_layers)
    return with_recurrence(spec, kinds, _delta(fields, spec.norm_eps)) if RECURRENT in kinds else spec


def _refuse_others(fields: Fields) -> None:
    """Raise ModelConfigError for what other models of this kind have, such as Kimi K3."""
    if not fields.flag("mla_use_nope", True):
        raise fields.error("mla_use_nope", "is false: rotary embedding is not supported here")
    if fields.text("moe_router_activation_func") not in (None, "sigmoid"):
        raise fields.error("moe_router_activation_func", "other than sigmoid is not supported")
    for name in ("mla_use_output_gate", "routed_expert_hidden_size", "attn_res_block_size"):
        fields.refuse(name, "Kimi K3 is not supported")
    for name in ("gate_lower_bound", "use_full_rank_gate"):
        fields.section("linear_attn_config").refuse(name, "Kimi K3 is not supported")


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    """Return the kind of each layer, by a list of names or by two lists of layers, counted from 1."""
    section = fields.section("linear_attn_config")
    if fields.get("layer_types") is not None or section.get("full_attn_layers") is None:
        return layer_kinds(
            fields, num_layers, LINEAR_TYPES, lambda layer: ATTENTION if layer and layer % 4 == 0 else RECURRENT
        )
    found: dict[int, str] = {}
    for name, kind in (("full_attn_layers", ATTENTION), ("kda_layers", RECURRENT)):
        listed = section.get(name)
        if not isinstance(listed, list) or not all(type(each) is int for each in listed):
            raise section.error(name, "must be a list of layers, counted from 1")
        found |= {layer - 1: kind for layer in listed}
    if found.keys() != set(range(num_layers)) or ATTENTION not in found.values():
        raise section.error("full_attn_layers", f"and kda_layers must name the {num_layers} layers, some in each")
    return [found[layer] for layer in range(num_layers)]


def _dense_layers(fields: Fields, num_layers: int) -> set[int]:
    """Return the layers that have an MLP in the place of experts."""
    kinds, every = fields.get("mlp_layer_types"), fields.integer("moe_layer_freq", 1)
    if every != 1:
        raise fields.error("moe_layer_freq", "other than 1 is not supported")
    if kinds is None:
        return set(range(min(num_layers, count_from_0(fields, "first_k_dense_replace", 1))))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("mlp_layer_types", f"must be a list with num_hidden_layers {num_layers} entries")
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise fields.error("mlp_layer_types", f"{brief(kind)} is not supported; supported: dense, sparse")
    return {layer for layer, kind in enumerate(kinds) if kind == "dense"}


def _delta(fields: Fields, eps: float) -> GatedDeltaSpec:
    """Return Kimi delta attention; older files have its sizes in an object of their own."""
    section = fields.section("linear_attn_config")
    older = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
    sizes = fields if not section.names() else section
    heads, size = (name if sizes is fields else older[name] for name in older)
    num_heads = sizes.integer(heads, 32, at_most=MOST_HEADS)
    head_size = sizes.integer(size, 128, at_most=MOST_SIZE)
    width = taps(sizes, "linear_conv_kernel_dim" if sizes is fields else "short_conv_kernel_size", 4)
    shape = DeltaState(num_heads, num_heads, head_size, head_size, gate_by_key=True)
    return GatedDeltaSpec(shape, width, eps, _DELTA, rank=head_size)
