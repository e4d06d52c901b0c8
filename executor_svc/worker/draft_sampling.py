"""Samples drafts with the target's parameters and the target's noise at each position.

So a draft agrees with the target as often as two such draws can (Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from executor_svc.batch.scheduled import SampledRows
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.columns import row_columns
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.sampler import sample, sample_greedy


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
