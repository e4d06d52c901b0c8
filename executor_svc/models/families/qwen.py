"""Qwen2 and 2.5 (Yang et al., 2024): Qwen2ForCausalLM; Qwen3 (Yang et al., 2025): Qwen3ForCausalLM.

Llama with biases on q, k and v in Qwen2, norms of query and key heads in Qwen3, and an optional window in the last
layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import layer_windows, optional_window, read_common, with_windows
from executor_svc.models.specs.spec import DecoderSpec

_HasWindow = Callable[[int, float], bool]
_WINDOW = 4096
_FULL_LAYERS = 28


def read_qwen2(config: dict[str, Any], has_window: _HasWindow = operator.ge) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported.

    has_window: whether a layer has a window, by its index and `max_window_layers`, where there are no `layer_types`.
    """
    return replace(_windowed(config, read_common(config, max_positions=32_768), has_window), qkv_bias=True)


def read_qwen3(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    spec = _windowed(config, read_common(config, max_positions=32_768, head_size=128))
    bias = Fields(config).flag("attention_bias", False)
    return replace(spec, head_norms="heads", qkv_bias=bias, output_bias=bias)


def _windowed(config: dict[str, Any], spec: DecoderSpec, has_window: _HasWindow = operator.ge) -> DecoderSpec:
    """Return the spec with the window, if used, in the layers from max_window_layers on or in those of layer_types."""
    fields = Fields(config)
    window = optional_window(fields, _WINDOW) if fields.flag("use_sliding_window", False) else None
    full_layers = fields.number("max_window_layers", _FULL_LAYERS, at_least=0)
    windows = layer_windows(
        fields, spec.num_layers, window, lambda i: window is not None and has_window(i, full_layers)
    )
    return with_windows(spec, windows)
