"""Computes a step's tokens from its logits: a token for each slot that samples, or the candidates that it requested."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.candidates import best_candidates
from executor_svc.sampling.columns import candidate_columns, sampling_columns
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.sampler import sample, sample_greedy


def choose(
    logits: Tensor, best: IntArray, slots: Slots, scheduled: Scheduled, functions: RowFunctions
) -> SampledTokens:
    """Choose a token or candidates for each of scheduled.rows [Q]; before `commit`.

    logits: [L, vocab] float32, contiguous; best: [L] the most likely token of each row, -1 if it cannot be sampled.
    functions: the device's.
    """
    rows = scheduled.rows
    if slots.sampling.greedy[rows.slots].all():
        return sample_greedy(best.copy() if rows.sources is None else best[rows.sources])
    sampled = sample(logits, sampling_columns(slots, scheduled), functions, best)
    if not len(rows.candidates):
        return sampled
    candidates = best_candidates(logits, candidate_columns(slots, scheduled), functions)
    num_rows = len(rows.slots)
    drawn = np.delete(np.arange(num_rows), rows.candidates)
    tokens, errors = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    tokens[drawn], errors[drawn] = sampled.token_ids, sampled.errors
    errors[rows.candidates] = candidates.errors
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = logprobs.of_rows(drawn)
    return SampledTokens(tokens, errors, logprobs, candidates)
