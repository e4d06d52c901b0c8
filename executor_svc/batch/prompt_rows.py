"""Which prompt tokens a step tells logprobs of, and the entries of its result that tell them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_svc.batch.ragged import spans
from executor_svc.batch.slots import Scheduled, Slots
from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.plan.plan import SlotLogprobs


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompt tokens that a step tells logprobs of: S slots that asked, Q tokens, in the order of slots.

    Computing the positions a to b - 1 of a sequence predicts its tokens a + 1 to b; those behind the prompt are output
    and not told.
    """

    slots: IntArray
    """[S], ascending."""
    starts: IntArray
    """[S] index of each slot's first such token in its sequence."""
    counts: IntArray
    """[S] its number of them, one or more."""
    num_top: IntArray
    """[S] best tokens wanted beside each."""
    rows: IntArray
    """[Q] the tokens that predict them, as indices into the T tokens of the step."""
    token_ids: IntArray
    """[Q]."""


def prompt_rows(slots: Slots, scheduled: Scheduled) -> PromptRows | None:
    """What the scheduled tokens tell of prompts, before `commit`; None if nothing that was asked for."""
    num_top = slots.sampling["num_prompt_logprobs"][scheduled.slots]
    if (num_top < 0).all():
        return None
    context = slots.num_computed_tokens[scheduled.slots]
    left = slots.num_prompt_tokens[scheduled.slots] - 1 - context
    counts = np.where(num_top >= 0, np.minimum(scheduled.num_tokens, left), 0)
    asked = np.flatnonzero(counts > 0)
    if not len(asked):
        return None
    first_rows = (np.cumsum(scheduled.num_tokens) - scheduled.num_tokens)[asked]
    chosen, starts, counts = scheduled.slots[asked], context[asked] + 1, counts[asked]
    owner, positions = spans(starts, counts)
    return PromptRows(
        slots=chosen,
        starts=starts,
        counts=counts,
        num_top=np.minimum(num_top[asked], slots.limits.vocab_size),
        rows=spans(first_rows, counts)[1],
        token_ids=slots.token_ids[chosen[owner], positions].astype(np.int64),
    )


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """Logprobs of Q tokens; those of the best tokens lie behind each other, num_top of each row."""

    chosen: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top: FloatArray


def by_slot(asked: PromptRows, columns: PromptColumns) -> tuple[SlotLogprobs, ...]:
    """One entry for each slot that asked."""
    ends = np.cumsum(asked.counts)
    top_ends = np.cumsum(asked.counts * asked.num_top)
    entries = []
    for i, slot in enumerate(asked.slots.tolist()):
        rows = slice(int(ends[i] - asked.counts[i]), int(ends[i]))
        best = slice(int(top_ends[i] - asked.counts[i] * asked.num_top[i]), int(top_ends[i]))
        entries.append(
            SlotLogprobs(
                slot=slot,
                start=int(asked.starts[i]),
                chosen_logprobs=columns.chosen[rows],
                chosen_ranks=columns.ranks[rows],
                num_top=int(asked.num_top[i]),
                top_token_ids=columns.top_ids[best],
                top_logprobs=columns.top[best],
            )
        )
    return tuple(entries)
