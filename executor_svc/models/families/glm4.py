"""GLM-4 0414 (Z.ai, 2025), 9B and 32B: Glm4ForCausalLM.

Norms before and after, biases on q, k and v, and a rotary embedding of half of each head, whose pairs are neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import absent, read_common, uniform_rope
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_NAMES = LayerNames(
    after_attention="post_self_attn_layernorm",
    after_mlp="post_mlp_layernorm",
    into_mlp=("mlp.gate_up_proj",),
)


@absent(num_key_value_heads=2)
def read_glm4(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    rotary = uniform_rope(partial=0.5)
    spec = read_common(config, max_positions=131_072, head_size=128, eps=1.5625e-07, read_rotary=rotary)
    bias = Fields(config).flag("attention_bias", True)
    return with_pairs(replace(spec, names=_NAMES, qkv_bias=bias))


def with_pairs(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a model whose checkpoint rotates neighbouring columns of heads; all layers rotate as many."""
    (size,) = {layer.rope.size for layer in spec.layers if layer.rope is not None}
    return replace(spec, rotary_pairs=size)
