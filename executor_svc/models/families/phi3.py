"""Phi-3 and Phi-4 mini (Abdin et al., 2024): Phi3ForCausalLM. Phi-3.5-MoE: PhimoeForCausalLM.

Llama with fused tensors, an optional window, rotary embedding of a part of each head, and longrope. The mixture has
norms of mean and variance, biases, that of the head included, and a router of its own (SparseMixer: Liu et al., 2023).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import DEFAULT_THETA, read_rope, rope_section
from executor_svc.models.families.common import absent, optional_window, read_common, with_windows
from executor_svc.models.families.experts import read_router, with_experts, without_experts
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.layers.rope_scaling import LongScaling, LongScalingOfTwo
from executor_svc.models.specs.spec import DecoderSpec, ExpertNames, ExpertsSpec, LayerNames

W_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    into=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)
FUSED = LayerNames(qkv=("self_attn.qkv_proj",), into_mlp=("mlp.gate_up_proj",))
_MAX_POSITIONS = 4096
_MIXTURE_POSITIONS, _MIXTURE_THETA, _JITTER = 131_072, 1_000_000.0, 0.01
_NUM_EXPERTS = 16
_ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Rope types by name in config.json; older checkpoints call longrope su or yarn."""


def read_phi3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec = read_common(config, max_positions=_MAX_POSITIONS, eps=1e-5, read_rotary=_rope)
    spec = with_windows(spec, [optional_window(Fields(config), None)] * spec.num_layers)
    return replace(spec, names=FUSED)


def _rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    return read_rope(
        rope_section(fields),
        head_size,
        max_positions=max_positions,
        theta=fields.number("rope_theta", DEFAULT_THETA),
        original=fields.integer("original_max_position_embeddings", _MAX_POSITIONS),
        partial=fields.number("partial_rotary_factor", 1.0),
        kinds=_ROPE_KINDS,
    )


@absent(num_key_value_heads=8)
def read_phimoe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields({"num_local_experts": _NUM_EXPERTS, "num_experts_per_tok": 2} | config)
    spec = read_common(without_experts(config), max_positions=_MIXTURE_POSITIONS, eps=1e-5, read_rotary=_mixture_rope)
    bias = fields.flag("attention_bias", False)
    jitter = fields.number("router_jitter_noise", _JITTER, at_least=0.0)
    router = read_router(fields, scores="logits", weighing="sparsemixer", jitter=jitter)
    if router.num_chosen != 2:
        raise fields.error("num_experts_per_tok", f"must be 2, which this router chooses, not {router.num_chosen}")
    spec = replace(
        with_windows(spec, [optional_window(fields, None)] * spec.num_layers),
        norm="layer with bias",
        qkv_bias=bias,
        output_bias=bias,
        head_bias=fields.flag("lm_head_bias", False),
    )
    return with_experts(spec, ExpertsSpec(router, spec.intermediate_size, W_NAMES))


def _mixture_rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    section = rope_section(fields)
    theta = fields.number("rope_theta", _MIXTURE_THETA)
    kinds = {name: kind for name, kind in _ROPE_KINDS.items() if name != "yarn"}
    original = None
    if fields.get("original_max_position_embeddings") is not None:
        original = fields.integer("original_max_position_embeddings")
    rope = read_rope(section, head_size, max_positions=max_positions, theta=theta, original=original, kinds=kinds)
    scaling = rope.scaling
    if not isinstance(scaling, LongScaling):
        return rope
    long, short = (section.number(f"{name}_mscale", scaling.attention_factor) for name in ("long", "short"))
    lists = scaling.short_factor, scaling.long_factor
    return replace(rope, scaling=LongScalingOfTwo(*lists, scaling.original_max_position, long, short))
