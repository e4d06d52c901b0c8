"""EXAONE 4 (LG AI Research, 2025, arXiv 2507.11407): Exaone4ForCausalLM.

Norms after attention and feed-forward and none before, and norms of heads. With a window in three of four layers, the
others have no rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import (
    MAX_LAYERS,
    layer_windows,
    optional_window,
    read_common,
    rotated_where,
    with_windows,
)
from executor_svc.models.families.olmo import NORMS_AFTER
from executor_svc.models.specs.spec import DecoderSpec

_WINDOW, _EVERY = 4096, 4


def read_exaone4(config: dict[str, Any]) -> DecoderSpec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported."""
    fields = Fields(config)
    spec = replace(read_common(config, max_positions=2048, eps=1e-5), names=NORMS_AFTER, head_norms="heads")
    window = optional_window(fields, _WINDOW)
    if window is None:
        return spec
    pattern = _pattern(fields) if fields.get("layer_types") is None else [True]
    windows = layer_windows(fields, spec.num_layers, window, lambda i: pattern[i % len(pattern)])
    return rotated_where(with_windows(spec, windows), [each is not None for each in windows])


def _pattern(fields: Fields) -> list[bool]:
    """Return whether a layer has a window, for each layer of the pattern: a text of L and G, or their number."""
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.error("sliding_window_pattern", f"must be a text of L and G, not {brief(pattern)}")
        return [letter == "L" for letter in pattern]
    every = fields.integer("sliding_window_pattern", _EVERY, at_most=MAX_LAYERS)
    return [True] * (every - 1) + [False]
