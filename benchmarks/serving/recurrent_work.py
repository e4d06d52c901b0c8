"""The sizes of recurrent layers that a step's work depends on, from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """Of one recurrent layer."""

    parameters: int = 0
    """Of its matrices, without the MLP."""
    state_bytes: int = 0
    """Of a sequence: matrices in fp32, inputs of the convolution in the model's dtype."""
    flops: int = 0
    """Of a token's convolution and recurrence."""


def recurrent_sizes(config: Mapping[str, Any], item_bytes: int) -> RecurrentSizes:
    """The sizes of a layer of LFM2 or Qwen3.5; of other models zeros."""
    hidden, kind = int(config["hidden_size"]), config.get("model_type")
    if kind == "lfm2":
        taps = int(config["conv_L_cache"])
        return RecurrentSizes(4 * hidden * hidden, (taps - 1) * hidden * item_bytes, 2 * taps * hidden)
    if kind != "qwen3_5_text":
        return RecurrentSizes()
    key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    num_keys, num_values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    taps, channels = int(config["linear_conv_kernel_dim"]), 2 * num_keys * key + num_values * value
    matrices = hidden * (channels + 2 * num_values * value + 2 * num_values)
    state = 4 * num_values * key * value + (taps - 1) * channels * item_bytes
    # Decay, the product with the key, the update with it, and the product with the query.
    return RecurrentSizes(matrices, state, 2 * taps * channels + 7 * num_values * key * value)
