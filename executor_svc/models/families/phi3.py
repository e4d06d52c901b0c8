"""Phi-3 and Phi-4 mini (Abdin et al., 2024): Phi3ForCausalLM.

Llama with fused tensors, an optional window, rotary embedding of a part of each head, and longrope.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config_fields import Fields
from executor_svc.models.families.common import optional_window, read_common, with_windows
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.rope_fields import DEFAULT_THETA, read_rope, rope_section
from executor_svc.models.spec import DecoderSpec, LayerNames

FUSED = LayerNames(qkv=("self_attn.qkv_proj",), into_mlp=("mlp.gate_up_proj",))
_MAX_POSITIONS = 4096
_ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Rope types by name in config.json; older checkpoints call longrope su or yarn."""


def read_phi3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec = read_common(config, max_positions=_MAX_POSITIONS, eps=1e-5, read_rotary=_rope)
    spec = with_windows(spec, [optional_window(Fields(config), None)] * spec.num_layers)
    return replace(spec, names=FUSED)


def _rope(fields: Fields, head_size: int, max_positions: int) -> RopeConfig:
    return read_rope(
        rope_section(fields),
        head_size,
        max_positions=max_positions,
        theta=fields.number("rope_theta", DEFAULT_THETA),
        original=fields.integer("original_max_position_embeddings", _MAX_POSITIONS),
        partial=fields.number("partial_rotary_factor", 1.0),
        kinds=_ROPE_KINDS,
    )
