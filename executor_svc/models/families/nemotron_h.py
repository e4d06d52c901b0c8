"""Nemotron-H and Nemotron 3 (NVIDIA, 2025, arXiv 2504.03624): NemotronHForCausalLM.

Each layer is one part alone: Mamba-2, attention without rotary embedding, an MLP without gate, or experts without gate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import MAX_LAYERS, read_common
from executor_svc.models.families.experts import count_from_0, sigmoid_experts, without_experts
from executor_svc.models.families.recurrent import (
    ATTENTION,
    MOST_HEADS,
    MOST_SIZE,
    RECURRENT,
    layer_kinds,
    step_limits,
    taps,
)
from executor_svc.models.layers.mlp import Activation
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.recurrent_spec import MambaSpec
from executor_svc.models.specs.spec import DecoderSpec, ExpertNames, ExpertsSpec, LayerNames, LayerSpec
from executor_svc.plan.state_sizes import MambaState

_MLP, _EXPERTS = "mlp", "moe"
_MARKS = {"M": RECURRENT, "*": ATTENTION, "-": _MLP, "E": _EXPERTS}
_KINDS = {
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": _MLP,
    "moe": _EXPERTS,
}
_NAMES = LayerNames(
    before_attention="norm",
    before_mlp="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    into_mlp=("mixer.up_proj",),
    down="mixer.down_proj",
)
_EXPERT_NAMES = ExpertNames(
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    into=("mixer.experts.{}.up_proj",),
    down="mixer.experts.{}.down_proj",
    shared_into=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
)
_FILES = FileForm(before="backbone.", table="embeddings", norm="norm_f")
_ACTIVATIONS: dict[str, Activation] = {"relu2": "relu2"}
_DEFAULTS: dict[str, Any] = {"intermediate_size": 21_504, "num_key_value_heads": 8}
_EXPERT_DEFAULTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
"""What transformers takes for fields that a config.json leaves out."""
_OLD_NAMES = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_limit": "mamba_dt_limit",
}


def read_nemotron_h(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config, names=_OLD_NAMES)
    kinds = _layers(fields)
    fields.refuse("residual_in_fp32", "a residual in fp32 is not supported")
    fields.refuse("sliding_window", "windows are not supported here")
    spec = read_common(
        _DEFAULTS | without_experts(config) | {"num_hidden_layers": len(kinds)},
        max_positions=4096,
        head_size=128,
        eps=1e-5,
        eps_field="layer_norm_epsilon",
        activation=("mlp_hidden_act", "relu2", _ACTIVATIONS),
        names={"head_dim": "attention_head_dim"},  # of older files
    )
    layers = {ATTENTION: LayerSpec(None, has_mlp=False), _MLP: LayerSpec(None, has_attention=False)}
    if RECURRENT in kinds:
        mamba = _mamba(fields, spec.norm_eps)
        layers[RECURRENT] = LayerSpec(None, recurrent=mamba, has_attention=False, has_mlp=False)
    if _EXPERTS in kinds:
        layers[_EXPERTS] = LayerSpec(None, experts=_experts(_EXPERT_DEFAULTS | config), has_attention=False)
    bias = fields.flag("attention_bias", False)
    more = min(count_from_0(fields, "num_nextn_predict_layers", 0), MAX_LAYERS)  # of a head of multi-token prediction
    return replace(
        spec,
        layers=tuple(layers[kind] for kind in kinds),
        names=_NAMES,
        files=_FILES,
        gated_mlp=False,
        norms_in_fp32=True,
        qkv_bias=bias,
        output_bias=bias,
        may_lack_biases=True,  # of attention: transformers' code and vLLM's read none
        mlp_bias=fields.flag("mlp_bias", False),
        ignored=("mtp.", *(f"model.layers.{len(kinds) + layer}." for layer in range(more))),
    )


def _layers(fields: Fields) -> list[str]:
    """Return the kind of each layer, by a list or by one mark for each."""
    name, pattern = "layers_block_type", fields.get("hybrid_override_pattern")
    if fields.get(name) is None and fields.get("layer_types") is not None:
        name = "layer_types"
    if (listed := fields.get(name)) is not None:
        count = len(listed) if isinstance(listed, list) else 0
        return layer_kinds(fields, _count(fields, count), _KINDS, lambda layer: "", name)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_MARKS):
        raise fields.error("hybrid_override_pattern", f"must be a text of {', '.join(_MARKS)}, not {brief(pattern)}")
    if len(pattern) != _count(fields, len(pattern)):
        raise fields.error("hybrid_override_pattern", f"has {len(pattern)} marks, not num_hidden_layers of them")
    kinds = [_MARKS[mark] for mark in pattern]
    if ATTENTION not in kinds:
        raise fields.error("hybrid_override_pattern", "has no layer of attention, which is not supported")
    return kinds


def _count(fields: Fields, listed: int) -> int:
    return fields.integer("num_hidden_layers", max(1, listed), at_most=MAX_LAYERS)


def _mamba(fields: Fields, eps: float) -> MambaSpec:
    heads = fields.integer("mamba_num_heads", 128, at_most=MOST_HEADS)
    groups = fields.integer("n_groups", 8, at_most=MOST_HEADS)
    if heads % groups:
        raise fields.error("n_groups", f"{groups} does not divide mamba_num_heads {heads}")
    if fields.text("mamba_hidden_act") not in (None, "silu"):
        raise fields.error("mamba_hidden_act", "other than silu is not supported")
    size = fields.integer("mamba_head_dim", 64, at_most=MOST_SIZE)
    shape = MambaState(heads, size, fields.integer("ssm_state_size", 128, at_most=MOST_SIZE), groups)
    biased = fields.flag("use_bias", False)
    return MambaSpec(
        shape,
        taps(fields, "conv_kernel", 4),
        eps,
        conv_biased=fields.flag("use_conv_bias", True),
        biased=biased,
        output_biased=biased,
        limits=step_limits(fields),
        name="mixer",
    )


def _experts(config: dict[str, Any]) -> ExpertsSpec:
    fields = Fields(config)
    fields.refuse("moe_latent_size", "experts between latent projections are not supported")
    fields.refuse("mlp_bias", "biases of experts are not supported")
    experts = sigmoid_experts(fields)
    shared = 0
    if experts.shared_size:
        shared = fields.integer("moe_shared_expert_intermediate_size", 7688)
    return replace(experts, names=_EXPERT_NAMES, shared_size=shared, gated=False)
