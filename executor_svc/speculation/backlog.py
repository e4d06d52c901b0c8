"""How many tokens of each slot a step indexes: a long prompt is indexed over several steps."""

from __future__ import annotations

import numpy as np

from executor_svc.plan.arrays import IntArray


def tokens_to_index(waiting: IntArray, always: int, budget: int) -> IntArray:
    """Return [n] how many of the waiting [n] tokens of n slots this step indexes.

    always: up to this number is indexed for every slot, so that none falls further behind as it grows; budget: the
    number of tokens beyond that, for all slots together; it goes to those with the fewest waiting, then the first ones.
    """
    beyond = waiting - always
    if not len(waiting) or beyond.max() <= 0:
        return waiting
    beyond = np.maximum(beyond, 0)
    order = np.argsort(beyond, kind="stable")
    sorted_beyond = beyond[order]
    before = sorted_beyond.cumsum() - sorted_beyond
    taken = np.empty_like(waiting)
    taken[order] = np.clip(budget - before, 0, sorted_beyond)
    result: IntArray = np.minimum(waiting, always) + taken
    return result
