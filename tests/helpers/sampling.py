"""Columns for the sampler, and what its distribution ought to be, spelled out in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from executor_svc.sampler import SamplingColumns

NO_IDS = np.zeros(0, np.int64)


def columns(n: int, **given: Any) -> SamplingColumns:
    """Columns of n rows: each field a value for all or [n]; min_p in place of its log; seeds 0 to n - 1."""
    fields: dict[str, Any] = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": np.arange(n), "sample_index": 0,
        "position": 10, "num_logprobs": -1, "masked_rows": NO_IDS, "masked_ids": NO_IDS,
    }  # fmt: skip
    assert given.keys() <= fields.keys()
    fields |= given

    def column(name: str, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(fields[name], dtype), (n,)).copy()

    with np.errstate(divide="ignore"):
        log_min_p = np.log(column("min_p", np.float32))
    return SamplingColumns(
        temperature=column("temperature", np.float32),
        top_p=column("top_p", np.float32),
        top_k=column("top_k", np.int64),
        log_min_p=log_min_p,
        seed=column("seed", np.uint64),
        sample_index=column("sample_index", np.int64),
        position=column("position", np.int64),
        num_logprobs=column("num_logprobs", np.int64),
        masked_rows=fields["masked_rows"],
        masked_ids=fields["masked_ids"],
    )


def exact_probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """[vocab] float64: temperature, min_p, top_k, top_p in this order, ties to the lowest id."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0.0)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0.0
    return p / p.sum()
