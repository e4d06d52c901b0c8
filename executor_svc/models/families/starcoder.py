"""StarCoder2 (BigCode, 2024, arXiv 2402.19173): Starcoder2ForCausalLM.

Norms of mean and variance, an MLP without gate, biases everywhere, and a window in all layers if there is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import absent, optional_window, read_common, with_windows
from executor_svc.models.layers.mlp import Activation
from executor_svc.models.specs.spec import DecoderSpec, LayerNames

_ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}


@absent(num_key_value_heads=2)
def read_starcoder2(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    bias = fields.flag("use_bias", True)
    spec = read_common(
        config,
        max_positions=4096,
        eps=1e-5,
        eps_field="norm_epsilon",
        tied=True,
        activation=("hidden_act", "gelu_pytorch_tanh", _ACTIVATIONS),
    )
    return replace(
        with_windows(spec, [optional_window(fields, None)] * spec.num_layers),
        names=LayerNames(into_mlp=("mlp.c_fc",), down="mlp.c_proj"),
        gated_mlp=False,
        norm="layer with bias",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )
