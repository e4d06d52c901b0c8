"""Falcon-H1 (TII, 2025, arXiv 2507.22448): FalconH1ForCausalLM. Mamba-2 beside attention in each layer, and factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import whole_heads
from executor_svc.models.families.llama import read_llama
from executor_svc.models.families.recurrent import read_mamba
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.recurrent_spec import MambaFactors, MambaSpec
from executor_svc.models.specs.spec import DecoderSpec, LayerNames, LinearFactors

_NAMES = LayerNames(
    before_mlp="pre_ff_layernorm",
    into_mlp=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_FILES = FileForm(norm="final_layernorm")
_INNER = 1024
_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
"""What transformers takes for fields that a config.json leaves out."""
_MOST_EXPAND = 64


def read_falcon_h1(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    spec = read_llama(
        {
            "head_dim": whole_heads(fields),
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
        }
        | config
    )
    into, mlp = fields.number("attention_in_multiplier", 1.0), _factors(fields, "mlp_multipliers", 2)
    if into != 1.0:
        fields.refuse("attention_bias", "biases are not supported beside an attention_in_multiplier")
    mamba = _mamba(fields, spec)
    return replace(
        spec,
        layers=tuple(replace(layer, recurrent=mamba) for layer in spec.layers),
        names=_NAMES,
        files=_FILES,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logits_divisor=1 / fields.number("lm_head_multiplier", 1.0),
        # That of queries and keys each, and that of keys.
        attention_scale=spec.attention_scale * into * into * fields.number("key_multiplier", 1.0),
        adaptable=not fields.flag("has_folded_factors", False),  # in GGUF files
        factors=LinearFactors(into * fields.number("attention_out_multiplier", 1.0), *mlp),
    )


def _mamba(fields: Fields, spec: DecoderSpec) -> MambaSpec:
    if fields.has("mamba_d_ssm") and fields.get("mamba_d_ssm") is None:
        inner = fields.integer("mamba_expand", 2, at_most=_MOST_EXPAND) * spec.hidden_size
    else:
        inner = fields.integer("mamba_d_ssm", _INNER)
    into = fields.number("ssm_in_multiplier", 1.0)
    if into != 1.0:
        fields.refuse("mamba_proj_bias", "biases are not supported beside an ssm_in_multiplier")
    gate, x, b, c, dt = (into * each for each in _factors(fields, "ssm_multipliers", 5))
    before_gate = fields.flag("mamba_norm_before_gate", True)
    return replace(
        read_mamba(fields, inner, spec.norm_eps, (128, 1, 256)),
        has_norm=fields.flag("mamba_rms_norm", False),
        norm="norm then silu" if before_gate else "silu then norm",
        norm_in_fp32=True,
        output_biased=fields.flag("projectors_bias", False),
        factors=MambaFactors(gate, x, b, c, dt, fields.number("ssm_out_multiplier", 1.0)),
    )


def _factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if fields.get(name) is None else fields.numbers(name, count)
