"""LFM3 (Liquid AI, 2026): Lfm3ForCausalLM.

As LFM2, with windows in some layers of attention, a rotary embedding of each kind, norms before and after, and a gate
on each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import read_rope
from executor_svc.models.families.common import absent, optional_window, read_common
from executor_svc.models.families.lfm2 import FILES, NAMES, THETA
from executor_svc.models.families.recurrent import ATTENTION, RECURRENT, layer_kinds, taps, with_recurrence
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.layers.rope_scaling import ProportionalScaling
from executor_svc.models.specs.recurrent_spec import ShortConvSpec
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_WINDOWED = "windowed"
_KINDS = {"conv": RECURRENT, "full_attention": ATTENTION, "sliding_attention": _WINDOWED}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    _FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
"""Of a config.json without any."""
_SANDWICHED = replace(
    NAMES,
    after_attention="post_operator_norm",
    after_mlp="post_ffn_norm",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    output="self_attn.o_proj",
    head_gate="self_attn.gate_proj",
)
_POSITIONS, _WINDOW = 128_000, 256


@absent(num_key_value_heads=4)
def read_lfm3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config, names={"norm_eps": "rms_norm_eps"})
    given = {"norm_eps": fields.number("norm_eps", 1e-5)} | config
    spec = read_common(
        given,
        max_positions=_POSITIONS,
        head_size=128,
        eps=1e-5,
        eps_field="norm_eps",
        tied=True,
        read_rotary=lambda all_fields, head_size, _: _rope(all_fields, _SLIDING, head_size),
    )
    kinds = layer_kinds(fields, spec.num_layers, _KINDS, _default)
    window, full = optional_window(fields, _WINDOW), _rope(fields, _FULL, spec.head_size)
    layers = (
        replace(layer, window=window) if kind == _WINDOWED else replace(layer, rope=full)
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    bias = fields.flag("attention_bias", False)
    spec = replace(
        spec,
        layers=tuple(layers),
        head_norms="heads",
        names=_names(fields),
        files=FILES,
        qkv_bias=bias,
        output_bias=bias,
    )
    conv = ShortConvSpec(taps(fields, "conv_L_cache", 7), fields.flag("conv_bias", False))
    return with_recurrence(spec, kinds, conv)


def _default(layer: int) -> str:
    if layer % 4 == 2:
        return ATTENTION
    return RECURRENT if layer % 4 or layer == 0 else _WINDOWED


def _names(fields: Fields) -> LayerNames:
    names = _SANDWICHED
    if not fields.flag("use_sandwich_norm", True):
        names = replace(names, after_attention=None, after_mlp=None)
    return names if fields.flag("use_attention_gate", True) else replace(names, head_gate=None)


def _rope(fields: Fields, kind: str, head_size: int) -> RopeConfig:
    """Return the rotary embedding of a kind of layers."""
    fields.refuse("rope_scaling", "LFM3 has rope_parameters")
    by_kind = fields.section("rope_parameters")
    if by_kind.names() and not by_kind.sections():
        raise fields.error("rope_parameters", f"of LFM3 must have objects {_FULL} and {_SLIDING}")
    section = by_kind.section(kind) if by_kind.get(kind) else Fields(_ROPES[kind])
    if section.text("rope_type") != "proportional":
        kinds = {"default": "default"}
        return read_rope(section, head_size, max_positions=_POSITIONS, theta=THETA, kinds=kinds, rounding="sum")
    share = section.number("partial_rotary_factor", 1.0, at_least=0.0)
    if share > 1:
        raise section.error("partial_rotary_factor", f"{share:g} must be at most 1")
    if section.number("factor", 1.0) != 1.0:
        raise section.error("factor", "other than 1 is not supported here")
    plain = Fields({"rope_theta": section.number("rope_theta", _ROPES[_FULL]["rope_theta"])})
    rope = read_rope(plain, head_size, max_positions=_POSITIONS, rounding="sum")
    return replace(rope, scaling=ProportionalScaling(2 * int(share * head_size // 2)))
