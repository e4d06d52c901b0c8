"""gpt-oss (OpenAI, 2025, arXiv 2508.10925): GptOssForCausalLM.

Experts with biases and a clipped activation, sinks, biases in attention, and a window in every second layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import absent, layer_windows, optional_window, read_common, with_windows
from executor_svc.models.families.experts import read_router, with_experts, without_experts
from executor_svc.models.layers.experts import ClippedSwiglu
from executor_svc.models.specs.file_form import StackedForm
from executor_svc.models.specs.spec import DecoderSpec, ExpertNames, ExpertsSpec

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of a config.json without any."""
_WINDOW = 128


@absent(num_key_value_heads=8)
def read_gpt_oss(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _ROPE}
    fields = Fields(config)
    dense = {"rope_theta": 150_000.0, **without_experts(config)}
    spec = read_common(dense, max_positions=131_072, head_size=64, eps=1e-5)
    bias = fields.flag("attention_bias", True)
    spec = replace(spec, qkv_bias=bias, output_bias=bias, norms_in_fp32=True)
    window = optional_window(fields, _WINDOW)
    spec = with_windows(spec, layer_windows(fields, spec.num_layers, window, lambda layer: layer % 2 == 0))
    spec = replace(spec, layers=tuple(replace(layer, sinks=True) for layer in spec.layers))
    experts = ExpertsSpec(
        read_router(fields, usual=(128, 4), scores="logits", weighing="softmax"),
        spec.intermediate_size,
        ExpertNames(router="mlp.router", stacked=StackedForm(transposed=True, interleaved=True)),
        biased=True,
        activation=ClippedSwiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
    )
    return with_experts(spec, experts)
