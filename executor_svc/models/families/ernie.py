"""ERNIE 4.5 (Baidu, 2025), dense: Ernie4_5ForCausalLM.

Llama with rotated pairs of neighbours, and one flag for biases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import absent, read_common, uniform_rope
from executor_svc.models.families.glm4 import with_pairs
from executor_svc.models.specs.spec import DecoderSpec


@absent(num_key_value_heads=2, head_dim=128)
def read_ernie(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    return read_ernie_attention(config)


def read_ernie_attention(config: dict[str, Any]) -> DecoderSpec:
    """Return what mixtures have too."""
    rotary = uniform_rope(theta=500_000.0, rounding="sum")
    spec = read_common(config, max_positions=131_072, eps=1e-5, tied=True, read_rotary=rotary)
    bias = Fields(config).flag("use_bias", False)
    return with_pairs(replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=bias))
