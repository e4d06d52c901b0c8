"""Columns for the sampler, and what its distribution ought to be, spelled out in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cadenza_common.plan.sampling import COLUMNS
from executor_svc.plan.sampling import stored_value
from executor_svc.sampling.columns import SAMPLER_NEEDS, SamplingColumns
from executor_svc.sampling.logits_edits import LogitsEdits, RowTokens


def columns(n: int, edits: LogitsEdits | None = None, **given: Any) -> SamplingColumns:
    """Columns of n rows: parameters by name, a value for all or [n]; temperature 1, seeds 0 to n - 1, position 10."""
    fields: dict[str, Any] = {"temperature": 1.0, "seed": np.arange(n), "position": 10} | given
    position = np.broadcast_to(np.asarray(fields.pop("position"), np.int64), (n,)).copy()
    assert fields.keys() <= COLUMNS.keys()
    numbers = {}
    for name, column in COLUMNS.items():
        if column.need not in SAMPLER_NEEDS:
            continue
        values = np.broadcast_to(np.asarray(fields[name]), (n,)).tolist() if name in fields else [None] * n
        stored = [stored_value(name, value) for value in values]
        numbers[column.name] = np.array(stored, column.dtype)
    return SamplingColumns(numbers, position, edits)


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
