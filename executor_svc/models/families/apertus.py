"""Apertus (Swiss AI, 2025, arXiv 2509.14233): ApertusForCausalLM.

An MLP without gate, whose activation xIELU has learned scalars in each layer, and norms of heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import read_common, uniform_rope
from executor_svc.models.layers.mlp import Activation
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_NAMES = LayerNames(
    before_attention="attention_layernorm", before_mlp="feedforward_layernorm", into_mlp=("mlp.up_proj",)
)
_THETA = 12_000_000.0
_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Of a config.json without any."""
_ACTIVATIONS: dict[str, Activation] = {"xielu": "xielu", "relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh"}


def read_apertus(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _ROPE}
    fields = Fields(config)
    fields.refuse("post_norm", "norms after attention and feed-forward are not supported")
    if not fields.flag("qk_norm", True):
        raise fields.error("qk_norm", "is false: Apertus has norms of heads")
    bias = fields.flag("attention_bias", False)
    activation = ("hidden_act", "xielu", _ACTIVATIONS)
    rotary = uniform_rope(theta=_THETA)
    return replace(
        read_common(config, max_positions=65_536, eps=1e-5, read_rotary=rotary, activation=activation),
        names=_NAMES,
        gated_mlp=False,
        head_norms="heads",
        qkv_bias=bias,
        output_bias=bias,
    )
