"""Logprobs on the device by PyTorch, in the place of a kernel that is not right there."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.gpu.kernels.sampling.logprobs import DeviceLogprobs
from executor_svc.gpu.kernels.sampling.state import SamplingWorkspace
from executor_svc.sampling.functions import TorchFunctions
from executor_svc.sampling.logprobs import logprobs_of_few

_ROWS = 16
"""Computed at once: PyTorch holds a few copies of their logits."""


def row_logprobs_by_torch(
    logits: Tensor,
    rows: Tensor,
    sources: Tensor,
    tokens: Tensor,
    num_logprobs: Tensor,
    workspace: SamplingWorkspace,
    out: DeviceLogprobs,
    *,
    after_sampling: bool,
) -> None:
    """As `kernels.sampling.logprobs.row_logprobs`; neither workspace nor after_sampling matters."""
    functions, num_top = TorchFunctions(), min(out.top_ids.shape[1], logits.shape[1])
    for first in range(0, len(rows), _ROWS):
        these = slice(first, first + _ROWS)
        asked = num_logprobs.index_select(0, rows[these].clamp(min=0).long())
        there = (rows[these] >= 0) & (tokens[these] >= 0) & (asked >= 0)
        x = logits.index_select(0, sources[these].clamp(min=0).long())
        chosen = torch.where(there, tokens[these], 0)[:, None]
        found, ranks, ids, top = logprobs_of_few(x, chosen, num_top, functions)
        listed = there[:, None] & (torch.arange(num_top, device=x.device) < asked[:, None])
        for into, new, kept in (
            (out.chosen[these], found, there), (out.ranks[these], ranks, there),
            (out.top_ids[these, :num_top], ids, listed), (out.top[these, :num_top], top, listed),
        ):  # fmt: skip
            into.copy_(torch.where(kept, new.to(into.dtype), into))
