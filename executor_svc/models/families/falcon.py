"""Falcon (TII, 2023, arXiv 2311.16867): FalconForCausalLM. Of 7B, 11B, 40B and 180B.

Attention and feed-forward beside each other, with one norm of mean and variance or one for each, an MLP without gate,
and one KV head, or few. Files have q, k and v by KV head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import read_common
from executor_svc.models.families.gpt2 import ACTIVATIONS
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_FIELDS = {
    "hidden_size": "n_embed",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Names of older files."""
_NAMES = LayerNames(
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    into_mlp=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_FILES = FileForm(before="transformer.", layers="h", table="word_embeddings", norm="ln_f", qkv_by_head=True)


def read_falcon(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config, names=_FIELDS)
    fields.refuse("alibi", "positions by ALiBi (falcon-rw) are not supported")
    is_new = fields.flag("new_decoder_architecture", False)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_kv_heads", heads)
    if not is_new:
        kv_heads = 1 if fields.flag("multi_query", True) else heads
    if heads % kv_heads:
        raise fields.error("num_kv_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    spec = read_common(
        {**config, "head_dim": None, "num_key_value_heads": kv_heads},
        max_positions=2048,
        eps=1e-5,
        eps_field="layer_norm_epsilon",
        tied=True,
        activation=("activation", "gelu", ACTIVATIONS),
        names=_FIELDS,
    )
    bias, is_parallel = fields.flag("bias", False), is_new or fields.flag("parallel_attn", True)
    return replace(
        spec,
        names=_layer_names(fields, is_new, is_parallel),
        files=_FILES,
        gated_mlp=False,
        norm="layer with bias",
        parallel=is_parallel,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def _layer_names(fields: Fields, is_new: bool, is_parallel: bool) -> LayerNames:
    if not is_parallel:
        return _NAMES
    norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1, at_most=2)
    if not is_new or norms == 1:
        return replace(_NAMES, before_mlp=None)
    return replace(_NAMES, before_attention="ln_attn", before_mlp="ln_mlp")
