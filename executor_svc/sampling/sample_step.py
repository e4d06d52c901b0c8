"""Computes a step's tokens from its logits: a token for each slot that samples, or the candidates that it requested.

Drafts are sampled with the target's parameters and the target's noise at each position. So a draft agrees with the
target as often as two such draws can (Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from cadenza_common.plan.result import SlotError
from executor_svc.batch.scheduled import SampledRows, Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import LATE, SampledTokens
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.candidates import best_candidates
from executor_svc.sampling.columns import candidate_columns, row_columns, sampling_columns
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.masks import RowMasks, best_allowed
from executor_svc.sampling.sampler import sample, sample_greedy


def choose(
    logits: Tensor,
    best: IntArray,
    slots: Slots,
    scheduled: Scheduled,
    functions: RowFunctions,
    masks: RowMasks | None = None,
) -> SampledTokens:
    """Choose a token or candidates for each of scheduled.rows [Q]; before `commit`.

    logits: [L, vocab] float32; best: [L] the most likely token of each row, -1 if it cannot be sampled.
    functions: the device's. masks: of the rows' grammars; None: no row has one. A row whose grammar and other
    constraints leave no token fails with GRAMMAR, or with NO_ALLOWED_TOKEN if it reports candidates.
    """
    rows = scheduled.rows
    if scheduled.is_greedy or slots.sampling.greedy[rows.slots].all():
        sampled = sample_greedy(best.copy() if rows.sources is None else best[rows.sources])
        if masks is not None:
            _choose_allowed(logits, sampled, rows.sources, masks)
    else:
        sampled = _sample(logits.contiguous(), best, slots, scheduled, functions, masks)
    return sampled if masks is None else _with_errors(sampled, scheduled, masks)


def _sample(
    logits: Tensor,
    best: IntArray,
    slots: Slots,
    scheduled: Scheduled,
    functions: RowFunctions,
    masks: RowMasks | None,
) -> SampledTokens:
    rows = scheduled.rows
    sampled = sample(logits, sampling_columns(slots, scheduled, masks), functions, best)
    if not len(rows.candidates):
        return sampled
    candidates = best_candidates(logits, candidate_columns(slots, scheduled, masks), functions)
    num_rows = len(rows.slots)
    drawn = np.delete(np.arange(num_rows), rows.candidates)
    tokens, errors = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    tokens[drawn], errors[drawn] = sampled.token_ids, sampled.errors
    errors[rows.candidates] = candidates.errors
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = logprobs.of_rows(drawn)
    return SampledTokens(tokens, errors, logprobs, candidates)


def _choose_allowed(logits: Tensor, sampled: SampledTokens, sources: IntArray | None, masks: RowMasks) -> None:
    """Replace the most likely token of each masked row by the most likely one that its mask allows."""
    tokens = sampled.token_ids
    (others,) = (~masks.allow(tokens[masks.rows]) & (sampled.errors[masks.rows] == 0)).nonzero()
    x = logits.numpy()
    for index in others.tolist():
        row = int(masks.rows[index])
        source = row if sources is None else int(sources[row])
        tokens[row] = best_allowed(x[source], masks.bits[index])
        if tokens[row] < 0:
            sampled.errors[row] = int(SlotError.NO_ALLOWED_TOKEN)


def _with_errors(sampled: SampledTokens, scheduled: Scheduled, masks: RowMasks) -> SampledTokens:
    """Return the tokens with the errors of rows whose grammars failed, and with LATE."""
    errors = sampled.errors.copy()
    without = (errors == int(SlotError.NO_ALLOWED_TOKEN)) & masks.is_masked
    without[scheduled.rows.candidates] = False
    errors[without | (masks.failed & (errors == 0))] = int(SlotError.GRAMMAR)
    errors[masks.late] = LATE
    return replace(sampled, errors=errors)


def sample_drafts(
    slots: Slots, rows: IntArray, index: int, best: IntArray, logits: Callable[[], Tensor], functions: RowFunctions
) -> SampledTokens:
    """Sample a draft for each of the slots `rows` [n], as the target does after `index` drafts.

    best: [n] the most likely token of each, -1 for none. logits: returns [n, vocab_size]; not called if all are greedy.
    """
    if slots.sampling.greedy[rows].all():
        return sample_greedy(best.copy())
    columns = row_columns(slots, SampledRows(rows, np.full(len(rows), index), None, rows[:0]))
    numbers = {**columns.numbers, "num_logprobs": np.full(len(rows), -1)}
    return sample(logits().contiguous(), replace(columns, numbers=numbers), functions, best)
