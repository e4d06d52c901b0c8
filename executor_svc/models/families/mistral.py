"""Mistral (Jiang et al., 2023): MistralForCausalLM. Llama with a sliding window in all layers."""

from __future__ import annotations

from typing import Any

from executor_svc.models.config_fields import Fields
from executor_svc.models.families.common import optional_window, read_common, with_windows
from executor_svc.models.spec import DecoderSpec

_WINDOW = 4096


def read_mistral(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    fields.refuse("layer_types", "all layers of a Mistral model are alike")
    spec = read_common(config, max_positions=131_072)
    return with_windows(spec, [optional_window(fields, _WINDOW)] * spec.num_layers)
