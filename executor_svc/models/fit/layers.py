"""What the layers of a model keep, as the executor will lay it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor_svc.device.kv_cache import layout_of
from executor_svc.models.base import ModelConfigError
from executor_svc.models.decoder import layer_heads, layer_states
from executor_svc.models.registry import ARCHITECTURES, has_code, own_architecture


def read_kv(
    content: dict[str, Any], item: int, block_size: int, padded: Callable[[int], int]
) -> tuple[int, dict[int, int], int] | None:
    """Return the longest context, by window, 0: none, the bytes that a token takes, and those of a request's state.

    item: bytes of a number; padded: returns the size of heads in the cache. None for models without code in Cadenza,
    and for those that are refused.
    """
    named = content.get("architectures")
    found = own_architecture(named if isinstance(named, list) else [], content.get("model_type"))
    if found is None or not has_code(found, content):
        return None
    try:
        spec = ARCHITECTURES[found](content)
    except ModelConfigError:
        return None
    windows, dtype = [layer.window for layer in spec.layers], torch.bfloat16 if item == 2 else torch.float32
    units = [() if each is None else each.unit_bytes(1, dtype) for each in layer_states(spec)]
    layout = layout_of(layer_heads(spec), windows, spec.context_limit, padded, block_size, dtype, units=units)
    groups = zip(layout.windows, layout.pages_per_block, strict=True)
    of_token = {window: layout.page_bytes * pages // block_size for window, pages in groups}
    return spec.context_limit, of_token, layout.page_bytes * layout.pages_per_state
