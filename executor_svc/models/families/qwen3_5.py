"""Qwen3.5 and 3.6 (Qwen Team, 2026), dense: Qwen3_5ForCausalLM.

As Qwen3, with weights of norms around 0, a rotary embedding of a part of each head, and a gate on the output of
attention. Three of four of the released models' layers are recurrent: those are refused by their field.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config_fields import Fields
from executor_svc.models.families.common import read_common, uniform_rope
from executor_svc.models.spec import DecoderSpec

_PART = 0.25
_INTERVAL = 4
_FULL, _RECURRENT = "full_attention", "linear_attention"


def read_qwen3_5(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    spec = read_common(config, max_positions=32_768, head_size=256, read_rotary=uniform_rope(partial=_PART))
    _check_layers(fields, spec.num_layers)
    bias = fields.flag("attention_bias", False)
    return replace(
        spec,
        qkv_bias=bias,
        output_bias=bias,
        head_norms="heads",
        norm_weight_offset=1.0,
        attention_gate=True,
        ignored=("mtp.",),  # heads of multi-token prediction
    )


def _check_layers(fields: Fields, num_layers: int) -> None:
    """Raise ModelConfigError, by the field, for layers that are not of full attention."""
    types, interval = fields.get("layer_types"), fields.integer("full_attention_interval", _INTERVAL)
    if types is None:
        types = [_FULL if (index + 1) % interval == 0 else _RECURRENT for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        shown = f"{len(types)} entries" if isinstance(types, list) else brief(types)
        raise fields.error("layer_types", f"must be a list with num_hidden_layers {num_layers} entries, not {shown}")
    for index, kind in enumerate(types):
        if kind == _RECURRENT:
            raise fields.error(f"layer_types[{index}]:", f"{kind} (recurrent layers) is not supported yet")
        if kind != _FULL:
            raise fields.error(f"layer_types[{index}]:", f"{brief(kind)} is not supported; supported: {_FULL}")
