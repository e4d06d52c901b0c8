"""Logprobs, ranks and best tokens of rows of logits, for sampled tokens and for prompt tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.step_result import RowLogprobs
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.row_math import chunks, log_sum_exp, source_rows, take_rows, top_ids


def row_logprobs(
    logits: Tensor,
    tokens: IntArray,
    rows: IntArray,
    num_top: IntArray,
    functions: RowFunctions,
    sources: IntArray | None = None,
) -> RowLogprobs:
    """Return logprobs, ranks and best tokens of n of R rows, which read raw logits [L, vocab].

    Args:
        logits: [L, vocab] float32.
        tokens: [R] the token of each row.
        rows: [n] indices into the R rows.
        num_top: [n] number of best tokens requested for each.
        functions: the device's.
        sources: [R] the logits row that each row reads; None: its own.
    """
    vocab = logits.shape[1]
    widest = min(int(num_top.max()), vocab)
    parts = [
        _logprobs_of_few(take_rows(logits, source_rows(few, sources)), tokens[few], widest, functions)
        for few in chunks(rows, vocab)
    ]
    chosen, ranks, best, top = (torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    return RowLogprobs(rows, chosen, ranks, np.minimum(num_top, vocab), best, top)


def _logprobs_of_few(
    x: Tensor, tokens: IntArray, num_top: int, functions: RowFunctions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprob and rank [n] of each row's token, ids and logprobs [n, num_top] of its best tokens."""
    device = x.device
    chosen = torch.from_numpy(tokens)[:, None].to(device)
    log_total = log_sum_exp(x, functions)
    value = x.gather(1, chosen)
    ahead = (x > value) | ((x == value) & (torch.arange(x.shape[1], device=device) < chosen))
    best = top_ids(x, num_top) if num_top else chosen[:, :0]
    return (
        (value - log_total).to(torch.float32)[:, 0],
        ahead.sum(dim=1) + 1,
        best,
        (x.gather(1, best) - log_total).to(torch.float32),
    )
