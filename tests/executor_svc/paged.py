"""Layers of a cache among others in the pages of a pool. For tests only."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.device.kv_layout import KVLayout, LayerKV


def in_pages(kv_layer: Tensor) -> Tensor:
    """A copy of a layer [N, 2, KVH, B, D] that lies between two others, whose bits are NaN in any dtype.

    Of [N, 1, KVH, B, D] both halves are the same memory.
    """
    num_blocks, parts, heads, block_size, head_size = kv_layer.shape
    layout = KVLayout.of([LayerKV(heads, head_size, parts=parts)] * 3, block_size, kv_layer.dtype)
    pool = torch.full((num_blocks, layout.page_bytes), 0xFF, dtype=torch.uint8, device=kv_layer.device)
    layer = layout.views(pool)[1]
    layer[:, :parts].copy_(kv_layer)
    return layer
