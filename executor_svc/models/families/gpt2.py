"""GPT-2 (Radford et al., 2019): GPT2LMHeadModel; OPT (Zhang et al., 2022, arXiv 2205.01068): OPTForCausalLM.

Learned positions and no rotary embedding, norms of mean and variance, an MLP without gate, biases everywhere. GPT-2's
files have its weights transposed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import read_common, rotated_where
from executor_svc.models.layers.mlp import Activation
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.spec import DecoderSpec, LayerNames, LearnedPositions

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_GPT2_FIELDS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_GPT2_NAMES = LayerNames(
    before_attention="ln_1",
    before_mlp="ln_2",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    into_mlp=("mlp.c_fc",),
    down="mlp.c_proj",
)
_GPT2_FILES = FileForm(
    before="transformer.",
    layers="h",
    table="wte",
    positions="wpe",
    norm="ln_f",
    transposed=True,
    masks=(".attn.bias", ".attn.masked_bias"),
)
_OPT_NAMES = LayerNames(
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    output="self_attn.out_proj",
    into_mlp=("fc1",),
    down="fc2",
)
_OPT_FILES = FileForm(before="model.decoder.", norm="final_layer_norm")
_OPT_OFFSET = 2


def read_gpt2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config, names=_GPT2_FIELDS)
    fields.refuse("add_cross_attention", "the model has no encoder here")
    fields.refuse("scale_attn_by_inverse_layer_idx", "layers with scales of their own are not supported")
    if not fields.flag("scale_attn_weights", True):
        raise fields.error("scale_attn_weights", "is false: attention without a scale is not supported")
    spec = _read_learned(
        config, _GPT2_FIELDS, max_positions=1024, activation="gelu_new", eps=fields.number("layer_norm_epsilon", 1e-5)
    )
    return replace(spec, names=_GPT2_NAMES, files=_GPT2_FILES, qkv_bias=True, output_bias=True, mlp_bias=True)


def read_opt(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec = _read_learned(
        config, {"intermediate_size": "ffn_dim"}, max_positions=2048, activation="relu", eps=1e-5, offset=_OPT_OFFSET
    )
    bias = Fields(config).flag("enable_bias", True)
    return replace(spec, names=_OPT_NAMES, files=_OPT_FILES, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def is_opt_of_one_width(config: dict[str, Any]) -> bool:
    """Return whether an OPT has the parts that are here: not those of 350m and Galactica, which transformers runs."""
    width = config.get("word_embed_proj_dim")
    flags = (
        ("do_layer_norm_before", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    )
    has_parts = all(config.get(name, value) in (value, None) for name, value in flags)
    return has_parts and width in (None, config.get("hidden_size"))


def _read_learned(
    config: dict[str, Any], names: dict[str, str], *, max_positions: int, activation: str, eps: float, offset: int = 0
) -> DecoderSpec:
    """Return a decoder with learned positions; offset: the row of the first one."""
    config = {**config, "head_dim": None, "num_key_value_heads": None, "rope_parameters": None, "rope_scaling": None}
    spec = read_common(
        config,
        max_positions=max_positions,
        tied=True,
        activation=("activation_function", activation, ACTIVATIONS),
        names=names,
    )
    return replace(
        rotated_where(spec, [False] * spec.num_layers),
        norm_eps=eps,
        gated_mlp=False,
        norm="layer with bias",
        positions=LearnedPositions(spec.context_limit, offset),
    )
