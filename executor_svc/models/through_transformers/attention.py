"""Replaces attention inside transformers' models: Cadenza's kernels write keys and values to the paged cache.

A model calls it through transformers' `AttentionInterface`, once for each layer and always in the same order: the n-th
call of a forward pass uses the n-th layer of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Kernels, KVScales, Rope

NAME = "cadenza_paged"
"""Name of the attention in transformers, which makes no mask for it."""

PROBE_NAME = "cadenza_probe"
"""Name of the attention during a probe: masks are described instead of made, see `probe.describe_mask`."""


SINKS = "s_aux"
"""Argument of attention: one more score of each head, [H], of no value."""


class Attend(Protocol):
    """The signature of attention in transformers' models."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the output [1, T, H, DV] for query [1, H, T, DK], key [1, KVH, T, DK] and value [1, KVH, T, DV]."""
        ...


_current: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Make models in this context use this attention."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Call the attention of this context; registered in transformers as `NAME` and `PROBE_NAME`."""
    return _current.get()(module, query, key, value, attention_mask, **options)


class PagedAttention:
    """The attention of one forward pass, over the cache."""

    def __init__(
        self,
        kernels: Kernels,
        shapes: Sequence[AttentionShape],
        plan_of: Sequence[int],
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        rope: Rope,
        scales: Sequence[KVScales | None],
        tables: Sequence[int] = (),
    ) -> None:
        """kv_layers and scales: of each layer; plans: of each shape; plan_of: the index of each layer's shape; tables:
        as in `models.base.CausalLM`.

        The rope rotates nothing: a model with rotary embedding rotates by itself. scales: for a cache in fp8.
        """
        self._kernels = kernels
        self._shapes = shapes
        self._plan_of = plan_of
        self._kv_layers = kv_layers
        self._plans = plans
        self._rope = rope
        self._scales = scales
        self._tables = tables or [0] * len(kv_layers)
        self._layer = 0

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """As in `Attend`. Scale, window and softcap are those that the probe has found for the layer."""
        index, self._layer = self._layer, self._layer + 1
        shape, plan = self._shapes[self._plan_of[index]], self._plans[self._plan_of[index]]
        kv_layer, scales, table = self._kv_layers[index], self._scales[index], self._tables[index]
        qkv = _joined(query, key, value, shape, self._rope.cos.dtype)
        q = self._kernels.rope_write_kv(qkv, self._rope, kv_layer, shape, plan, scales=scales, table=table)
        sinks = options.get(SINKS)
        wide = None if sinks is None else sinks.float().contiguous()
        attended = self._kernels.attention(q, kv_layer, shape, plan, scales, wide, table)
        heads = attended.view(1, qkv.shape[0], shape.num_heads, shape.padded_head_size)
        return heads[..., : value.shape[-1]].to(value.dtype).contiguous(), None  # models view it in another shape


def _joined(query: Tensor, key: Tensor, value: Tensor, shape: AttentionShape, dtype: torch.dtype) -> Tensor:
    """Return q, k and v as [T, (H + 2 KVH) * DP], each head padded with zeros."""
    width, (q_end, k_end) = shape.padded_head_size, (shape.num_heads, shape.num_heads + shape.num_kv_heads)
    qkv = query.new_empty(query.shape[2], k_end + shape.num_kv_heads, width, dtype=dtype)
    for start, end, part in ((0, q_end, query), (q_end, k_end, key), (k_end, qkv.shape[1], value)):
        size = part.shape[-1]
        qkv[:, start:end, :size] = part[0].transpose(0, 1)
        if size < width:
            qkv[:, start:end, size:] = 0
    return qkv.flatten(1)
