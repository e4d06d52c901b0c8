"""The best next tokens of rows, for beam search: a pure function of each logits row and its edits, like the sampler.

The order is that of transformers' beam search (generation/utils.py, `_beam_search`): log_softmax of the raw logits,
then the logits processors on these log-probabilities, then the best of them. Temperature, filters and seed have no
effect.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.result import SlotError
from executor_svc.batch.step_result import RowCandidates
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.logits_edits import LogitsEdits
from executor_svc.sampling.logits_processors import process
from executor_svc.sampling.row_math import chunks, log_sum_exp, take_rows, top_ids


@dataclass(frozen=True, slots=True)
class CandidateColumns:
    """The parameters of C rows that need candidates, in columns."""

    sources: IntArray
    """[C] the logits row that each row reads."""
    num_candidates: IntArray
    """[C] number of candidates requested: from 1 to the vocabulary size."""
    edits: LogitsEdits | None = None
    """Changes to the log-probabilities of some of the C rows."""


def best_candidates(logits: Tensor, columns: CandidateColumns, functions: RowFunctions) -> RowCandidates:
    """Return the best tokens by edited log-probability of rows of logits [L, vocab] float32, which are not changed.

    Ties go to the lowest id. A token at -inf is no candidate, so a row may have fewer candidates than requested. A row
    whose logits contain NaN, +inf or only -inf fails with NON_FINITE_LOGITS; a row without any candidate fails with
    NO_ALLOWED_TOKEN.
    """
    num_rows, vocab = len(columns.sources), logits.shape[1]
    scores = torch.empty((num_rows, vocab), dtype=torch.float32, device=logits.device)
    finite = np.empty(num_rows, np.bool_)
    pieces = [slice(few[0], few[-1] + 1) for few in chunks(np.arange(num_rows), vocab)]
    for few in pieces:
        x = take_rows(logits, columns.sources[few])
        log_total = log_sum_exp(x, functions)
        torch.sub(x, log_total, out=scores[few])
        # NaN where the largest logit is NaN or infinite; a NaN counts as largest.
        finite[few] = log_total.isfinite().cpu().numpy()[:, 0]
    edits = columns.edits
    if edits is not None:
        scores.index_copy_(0, torch.from_numpy(edits.rows).to(scores.device), process(scores, edits))
    widest = int(columns.num_candidates.max())
    best = torch.cat([top_ids(scores[few], widest) for few in pieces])
    values = scores.gather(1, best)
    # Masked tokens come last.
    found = np.minimum(values.isfinite().sum(dim=1).cpu().numpy(), columns.num_candidates)
    errors = np.where(found > 0, 0, int(SlotError.NO_ALLOWED_TOKEN))
    errors[~finite] = int(SlotError.NON_FINITE_LOGITS)
    return RowCandidates(found, best.cpu().numpy(), values.cpu().numpy(), errors)
