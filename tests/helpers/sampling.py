"""Columns for the sampler, and what its distribution ought to be, spelled out in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from executor_svc.sampling.edits import LogitsEdits, RowTokens
from executor_svc.sampling.sampler import SamplingColumns


def columns(n: int, edits: LogitsEdits | None = None, **given: Any) -> SamplingColumns:
    """Columns of n rows: each field a value for all or [n]; min_p in place of its log; seeds 0 to n - 1."""
    fields: dict[str, Any] = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": np.arange(n), "sample_index": 0,
        "position": 10, "num_logprobs": -1,
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
        edits=edits,
    )


def edits(
    rows: int | Sequence[int],
    *,
    allowed: dict[int, Sequence[int]] | None = None,
    forbidden: dict[int, Sequence[int]] | None = None,
    biases: dict[int, dict[int, float]] | None = None,
    counts: dict[int, dict[int, int]] | None = None,
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0),
) -> LogitsEdits:
    """Edits of rows (a number: the first so many), each part by index into them.

    penalties: repetition, frequency, presence, the same for all that is in `counts`.
    """
    biases, counts = biases or {}, counts or {}
    biased, counted = _pairs(biases), _pairs(counts)
    return LogitsEdits(
        rows=np.arange(rows) if isinstance(rows, int) else np.array(rows, np.int64),
        allowed=_pairs(allowed or {}),
        forbidden=_pairs(forbidden or {}),
        biased=biased,
        biases=np.array([value for row in biases.values() for value in row.values()], np.float32),
        counted=counted,
        counts=np.array([value for row in counts.values() for value in row.values()], np.float32),
        repetition_penalty=np.full(len(counted.ids), penalties[0], np.float32),
        frequency_penalty=np.full(len(counted.ids), penalties[1], np.float32),
        presence_penalty=np.full(len(counted.ids), penalties[2], np.float32),
    )


def _pairs(by_row: Mapping[int, Iterable[int]]) -> RowTokens:
    pairs = np.array([(row, token) for row, ids in by_row.items() for token in ids], np.int64).reshape(-1, 2)
    return RowTokens(pairs[:, 0].copy(), pairs[:, 1].copy())


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


def edited_exactly(
    logits: np.ndarray,
    *,
    allowed: dict[int, Sequence[int]] | None = None,
    forbidden: dict[int, Sequence[int]] | None = None,
    biases: dict[int, dict[int, float]] | None = None,
    counts: dict[int, dict[int, int]] | None = None,
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0),
) -> np.ndarray:
    """[vocab] float64: the logits of row 0 after `edits` of the same arguments, step by step in vLLM's order."""
    x = logits.astype(np.float64)
    if allowed:
        x[[token for token in range(len(x)) if token not in allowed[0]]] = -np.inf
    if forbidden:
        x[list(forbidden[0])] = -np.inf
    for token, bias in (biases or {0: {}})[0].items():
        x[token] += bias
    repetition, frequency, presence = penalties
    for token, count in (counts or {0: {}})[0].items():
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= frequency * count + presence * (count > 0)
    return x
