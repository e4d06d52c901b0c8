"""Phi-1, 1.5 and 2 (Li et al., 2023, arXiv 2309.05463): PhiForCausalLM.

Attention and feed-forward read one norm of mean and variance, beside each other, with an MLP without gate, biases
everywhere, that of the head included, and a rotary embedding of a part of each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import read_common, uniform_rope
from executor_svc.models.families.gpt2 import ACTIVATIONS
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_NAMES = LayerNames(before_mlp=None, output="self_attn.dense", into_mlp=("mlp.fc1",), down="mlp.fc2")
_FUSED_NAMES = replace(_NAMES, qkv=("self_attn.qkv_proj",))
"""Of GGUF files that were made of the first form of Phi-2."""
_FILES = FileForm(norm="final_layernorm")


def read_phi(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec = read_common(
        {**config, "head_dim": None},  # transformers takes that of hidden_size
        max_positions=2048,
        eps=1e-5,
        eps_field="layer_norm_eps",
        read_rotary=uniform_rope(partial=0.5),
        activation=("hidden_act", "gelu_new", ACTIVATIONS),
    )
    is_fused = Fields(config).flag("has_fused_qkv", False)
    return replace(
        spec,
        names=_FUSED_NAMES if is_fused else _NAMES,
        files=_FILES,
        gated_mlp=False,
        norm="layer with bias",
        parallel=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def has_plain_heads(config: dict[str, Any]) -> bool:
    """Return whether heads have no norms of mean and variance, with which transformers runs a Phi."""
    return not config.get("qk_layernorm")
