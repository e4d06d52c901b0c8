"""What a rank makes of the rows of all ranks, of made-up ones: no rank waits for another."""

from __future__ import annotations

import torch

from executor_svc.device.ranks import Share
from executor_svc.gpu.checks.steps.words import differing, first_of
from executor_svc.gpu.choices.ways import Tolerance
from executor_svc.gpu.kernels.rank_rows import own_ids, pick_rows, sum_parts

_ROWS = 37
_EACH = 100
"""Tokens of a rank's table."""


def rank_rows_reason(share: Share, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Sum and pick random rows [ranks, rows, width] of dtype; return how the results are wrong."""
    generator, size = torch.Generator().manual_seed(0), share.size
    parts = torch.randn(size, _ROWS, width, generator=generator).to(dtype)
    bias = torch.randn(width, generator=generator).to(dtype)
    there, reasons = parts.to(device), list[str | None]()
    for added in (None, bias):
        found = torch.empty(_ROWS, width, dtype=dtype, device=device)
        sum_parts(there, None if added is None else added.to(device), found)
        expected = parts.double().sum(0) + (0 if added is None else added.double())
        reasons.append(Tolerance.of(dtype).reason_against(found, expected))
    tokens = torch.randint(0, size * _EACH, (_ROWS,), generator=generator)
    picked = torch.empty(_ROWS, width, dtype=dtype, device=device)
    pick_rows(there, tokens.to(device), _EACH, picked)
    wanted = parts[tokens // _EACH, torch.arange(_ROWS)]
    reasons.append(Tolerance(0.0, 0.0).reason_against(picked, wanted))
    first, ids = share.rank * _EACH, torch.empty(_ROWS, dtype=torch.int64, device=device)
    own_ids(tokens.to(device), first, _EACH, ids)
    its = (tokens >= first) & (tokens < first + _EACH)
    return first_of([*reasons, differing("ids", ids, torch.where(its, tokens - first, 0))])
