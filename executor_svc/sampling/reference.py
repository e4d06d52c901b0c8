"""The sampling distribution of one row in float64: the reference that tests compare both devices with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


def probabilities(
    logits: Row,
    *,
    top_n_sigma: float = 0.0,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Row:
    """Return the distribution [vocab] of a draw from edited logits [vocab].

    Filters apply in the order of the arguments; ties go to the lowest id.
    """
    x = logits.astype(np.float64)
    if top_n_sigma > 0:
        x[x < x.max() - top_n_sigma * x[np.isfinite(x)].std()] = -np.inf
    p = _softmax(x / temperature)
    p[p < min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0.0
    p = _normalized(p)
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0.0
    return _normalized(p)


def _softmax(x: Row) -> Row:
    return _normalized(np.exp(x - x.max()))


def _normalized(p: Row) -> Row:
    shares: Row = p / p.sum()
    return shares
