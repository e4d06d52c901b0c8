"""Nemotron 4 and Minitron (NVIDIA, 2024, arXiv 2407.14679), dense: NemotronForCausalLM.

Norms of mean and variance with 1 added to their weights, an MLP without gate, and a rotary embedding of half of each
head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import read_common, uniform_rope
from executor_svc.models.layers.mlp import Activation
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_ACTIVATIONS: dict[str, Activation] = {"relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh"}


def read_nemotron(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    return replace(
        read_common(
            config,
            max_positions=4096,
            eps=1e-5,
            eps_field="norm_eps",
            read_rotary=uniform_rope(partial=0.5),
            activation=("hidden_act", "relu2", _ACTIVATIONS),
        ),
        names=LayerNames(into_mlp=("mlp.up_proj",)),
        gated_mlp=False,
        norm="layer with bias",
        norm_weight_offset=1.0,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
