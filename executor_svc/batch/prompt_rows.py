"""The prompt tokens whose logprobs a step computes, and their entries in its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cadenza_common.plan.result import LogprobColumns
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import FloatArray, IntArray, column, float_column


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompt tokens whose logprobs a step computes: Q tokens of S slots that requested them, in slot order.

    Computing the positions a to b - 1 of a sequence predicts its tokens a + 1 to b. Predicted tokens after the end of
    the prompt are output tokens and are left out.
    """

    slots: IntArray
    """[S], ascending."""
    starts: IntArray
    """[S] index of each slot's first such token in its sequence."""
    counts: IntArray
    """[S] number of each slot's tokens, one or more."""
    num_top: IntArray
    """[S] number of most likely tokens requested for each position."""
    rows: IntArray
    """[Q] indices, into the T tokens of the step, of the tokens that predict them."""
    token_ids: IntArray
    """[Q]."""


def prompt_rows(slots: Slots, scheduled: Scheduled) -> PromptRows | None:
    """Return the prompt tokens that the scheduled tokens predict, before `commit`; None if none is requested."""
    if scheduled.is_one_each:
        return None
    num_top = slots.sampling["num_prompt_logprobs"][scheduled.slots]
    if (num_top < 0).all():
        return None
    context = slots.num_computed_tokens[scheduled.slots]
    left = slots.num_prompt_tokens[scheduled.slots] - 1 - context
    counts = np.where(num_top >= 0, np.minimum(scheduled.num_tokens, left), 0)
    requested = np.flatnonzero(counts > 0)
    if not len(requested):
        return None
    first_rows = (np.cumsum(scheduled.num_tokens) - scheduled.num_tokens)[requested]
    chosen, starts, counts = scheduled.slots[requested], context[requested] + 1, counts[requested]
    owner, positions = spans(starts, counts)
    return PromptRows(
        slots=chosen,
        starts=starts,
        counts=counts,
        num_top=np.minimum(num_top[requested], slots.limits.vocab_size),
        rows=spans(first_rows, counts)[1],
        token_ids=slots.token_ids[chosen[owner], positions].astype(np.int64),
    )


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """Logprobs of Q tokens. top_ids and top concatenate the most likely tokens of all rows, num_top each."""

    chosen: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top: FloatArray


def by_slot(requested: PromptRows, columns: PromptColumns) -> dict[int, LogprobColumns]:
    """Return one entry for each slot of `requested`."""
    ends = np.cumsum(requested.counts)
    top_ends = np.cumsum(requested.counts * requested.num_top)
    entries = {}
    for i, slot in enumerate(requested.slots.tolist()):
        rows = slice(int(ends[i] - requested.counts[i]), int(ends[i]))
        best = slice(int(top_ends[i] - requested.counts[i] * requested.num_top[i]), int(top_ends[i]))
        entries[slot] = LogprobColumns(
            start=int(requested.starts[i]),
            logprobs=float_column(columns.chosen[rows]),
            ranks=column(columns.ranks[rows]),
            num_top=int(requested.num_top[i]),
            top_token_ids=column(columns.top_ids[best]),
            top_logprobs=float_column(columns.top[best]),
        )
    return entries
