"""GPT-NeoX and Pythia (EleutherAI, 2022, 2023): GPTNeoXForCausalLM.

Attention and feed-forward beside each other, each with a norm of mean and variance, an MLP without gate, biases
everywhere, a rotary embedding of a part of each head. Files have q, k and v by head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import DEFAULT_THETA, read_rope, rope_section
from executor_svc.models.families.common import read_common
from executor_svc.models.families.gpt2 import ACTIVATIONS
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_NAMES = LayerNames(
    qkv=("attention.query_key_value",),
    output="attention.dense",
    into_mlp=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_FILES = FileForm(
    before="gpt_neox.",
    table="embed_in",
    norm="final_layer_norm",
    head="embed_out",
    qkv_by_head=True,
    masks=(".attention.bias", ".attention.masked_bias"),
)
_PART = 0.25


def read_gpt_neox(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    spec = read_common(
        {**config, "head_dim": None, "num_key_value_heads": None},  # transformers has neither
        max_positions=2048,
        eps=1e-5,
        eps_field="layer_norm_eps",
        read_rotary=_rope,
        activation=("hidden_act", "gelu", ACTIVATIONS),
    )
    bias = fields.flag("attention_bias", True)
    return replace(
        spec,
        names=_NAMES,
        files=_FILES,
        gated_mlp=False,
        norm="layer with bias",
        parallel=fields.flag("use_parallel_residual", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
    )


def _rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    return read_rope(
        rope_section(fields),
        head_size,
        max_positions=max_positions,
        theta=fields.number("rotary_emb_base", fields.number("rope_theta", DEFAULT_THETA)),
        partial=fields.number("rotary_pct", fields.number("partial_rotary_factor", _PART)),
    )
