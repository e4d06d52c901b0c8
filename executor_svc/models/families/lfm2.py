"""LFM2 and LFM2.5 (Liquid AI, 2025): Lfm2ForCausalLM; with experts: Lfm2MoeForCausalLM.

Gated short convolutions in the place of attention in most layers, and norms of query and key heads in the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import absent, read_common, uniform_rope, whole_heads
from executor_svc.models.families.experts import count_from_0, read_router, with_experts, without_experts
from executor_svc.models.families.recurrent import ATTENTION, RECURRENT, layer_kinds, taps, with_recurrence
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.recurrent_spec import ShortConvSpec
from executor_svc.models.specs.spec import DecoderSpec, ExpertNames, ExpertsSpec, LayerNames

NAMES = LayerNames(
    before_attention="operator_norm",
    before_mlp="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    into_mlp=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
_EXPERTS = ExpertNames(
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    into=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    down="feed_forward.experts.{}.w2",
)
FILES = FileForm(norm="embedding_norm")
THETA = 1_000_000.0
_POSITIONS = 128_000
_KINDS = {"conv": RECURRENT, "full_attention": ATTENTION}
_MIXTURE: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}
"""What transformers takes for fields that a config.json leaves out."""


@absent(num_key_value_heads=8)
def read_lfm2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    return _read({**config, "intermediate_size": _intermediate_size(fields)}, fields)


@absent(num_key_value_heads=8)
def read_lfm2_moe(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(_MIXTURE | config)
    spec = _read(without_experts(config), fields)
    shares, biased = fields.flag("norm_topk_prob", True), fields.flag("use_expert_bias", True)
    router = read_router(
        fields,
        scores="sigmoid",
        rounded_scores=True,
        weighing="shares" if shares else "scores",
        epsilon=1e-6,
        factor=fields.number("routed_scaling_factor", 1.0),
    )
    names = _EXPERTS if biased else replace(_EXPERTS, choice_bias=None)
    num_dense = count_from_0(fields, "num_dense_layers", 2)
    experts = ExpertsSpec(router, fields.integer("moe_intermediate_size"), names)
    return with_experts(spec, experts, lambda layer: layer < num_dense)


def _read(config: dict[str, Any], fields: Fields) -> DecoderSpec:
    """Return the parts that both families share, with an MLP in all layers."""
    if fields.get("tie_embedding") is not None:  # of older files
        config = {**config, "tie_word_embeddings": fields.flag("tie_embedding", True)}
    config = {"head_dim": whole_heads(fields)} | config
    rotary = uniform_rope(theta=THETA)
    spec = read_common(config, max_positions=_POSITIONS, eps=1e-5, eps_field="norm_eps", tied=True, read_rotary=rotary)
    attending = fields.get("full_attn_idxs")
    if attending is not None and not isinstance(attending, list):
        raise fields.error("full_attn_idxs", "must be a list of layers")

    def kind(layer: int) -> str:
        return ATTENTION if attending is None or layer in attending else RECURRENT

    conv = ShortConvSpec(taps(fields, "conv_L_cache", 3), fields.flag("conv_bias", False))
    spec = replace(spec, head_norms="heads", names=NAMES, files=FILES)
    return with_recurrence(spec, layer_kinds(fields, spec.num_layers, _KINDS, kind), conv)


def _intermediate_size(fields: Fields) -> int:
    """Return the size of MLPs, which files may state as one that is adjusted."""
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12_288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if fields.has("block_ffn_dim_multiplier") and fields.get("block_ffn_dim_multiplier") is None:
        return max(1, size)
    size = int(min(fields.number("block_ffn_dim_multiplier", 1.0), 1 << 20) * size)
    multiple = fields.integer("block_multiple_of", 256, at_most=1 << 20)
    return max(1, -(-size // multiple) * multiple)
