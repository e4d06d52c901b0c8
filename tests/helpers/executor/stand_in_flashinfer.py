"""Stands in for FlashInfer where there is no GPU: its wrapper for batches of one token each, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


class BatchDecodeWithPagedKVCacheWrapper:
    """As much of FlashInfer's as the benchmark calls."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype is torch.uint8
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        assert {each.dtype for each in (indptr, indices, last_page_len)} == {torch.int32}
        assert q_data_type is kv_data_type is torch.bfloat16
        self._heads = (num_kv_heads, num_qo_heads // num_kv_heads, head_dim)
        self._pages = [indices[first:end].long() for first, end in itertools.pairwise(indptr.tolist())]
        ends = zip(self._pages, last_page_len.tolist(), strict=True)
        self._lens = [(len(pages) - 1) * page_size + last for pages, last in ends]
        self._scale = sm_scale

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> Any:
        for row, (pages, length) in enumerate(zip(self._pages, self._lens, strict=True)):
            taken = paged_kv_cache[pages].double().permute(1, 2, 0, 3, 4).flatten(2, 3)
            keys, values = taken[:, :, :length]
            weights = torch.softmax(q[row].double().view(self._heads) @ keys.transpose(1, 2) * self._scale, -1)
            out[row] = (weights @ values).view(out[row].shape).to(out.dtype)
        return out
