"""Floors: the smallest scaled logit, log(p / p of the most likely token) under temperature, that a draw keeps.

A parameter that drops unlikely tokens is a floor. A row with several floors keeps the tokens that all of them keep.

min_p keeps tokens with a probability of at least min_p times that of the most likely one.
top_n_sigma (Tang et al., "Top-nσ: Not All Logits Are You Need", arXiv 2411.07641) keeps tokens with a logit, before
temperature, of at most n standard deviations below the highest. The deviation is that of all logits above -inf,
in float64, summed in the order of `row_math.fold_sum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.sampling.row_math import chunks, fold_sum


def row_floors(logits: Tensor, rows: IntArray, peak: Tensor, numbers: Mapping[str, Any]) -> Tensor | None:
    """Return the floors [n, 1] float32, at most 0, of n rows of logits [L, vocab] float32; None if no row has one.

    rows: [n] indices into the L; peak: [n, 1] their largest logits; numbers: [n] columns of the rows by name.
    """
    by_min_p: FloatArray = numbers["log_min_p"]
    (by_deviation,) = numbers["top_n_sigma"].nonzero()
    if not len(by_deviation) and not (by_min_p > -np.inf).any():
        return None
    floors = torch.from_numpy(by_min_p[:, None].copy()).to(logits.device)
    for few in chunks(by_deviation, logits.shape[1]):
        index = _on(logits, few)
        deviation = _deviations(logits.index_select(0, _on(logits, rows[few])), peak[index])
        width = (_on(logits, numbers["top_n_sigma"][few])[:, None] * deviation).to(torch.float32)
        floors[index] = torch.maximum(floors[index], -width / _on(logits, numbers["temperature"][few])[:, None])
    return floors


def _deviations(x: Tensor, peak: Tensor) -> Tensor:
    """Return the standard deviations [n, 1] float64 of rows x [n, vocab] float32 without -inf; peak: [n, 1]."""
    kept = x > float("-inf")
    below = x.to(torch.float64) - peak
    count = kept.sum(dim=1, keepdim=True)
    mean = fold_sum(below.where(kept, 0.0)) / count
    return (fold_sum((below - mean).square_().where(kept, 0.0)) / count).sqrt_()


def _on(logits: Tensor, values: IntArray | FloatArray) -> Tensor:
    return torch.from_numpy(values).to(logits.device)
