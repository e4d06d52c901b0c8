"""Which drafts a step accepts: those before the first that is not the token sampled in its place.

A token is a function of its row of logits, the sequence's parameters, seed and tokens, and a row's bits do not depend
on the other rows of the step. So the tokens are those that steps without drafts would sample, whatever the source of
the drafts is (Leviathan et al., arXiv 2211.17192, for the scheme; Daliri et al., arXiv 2408.07978, for noise shared by
draft and check).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import NOT_ACCEPTED, RowLogprobs, SampledTokens
from executor_svc.plan.arrays import BoolArray


def accept_drafts(slots: Slots, scheduled: Scheduled, sampled: SampledTokens) -> SampledTokens:
    """Return the sampled tokens of scheduled.rows [Q] with NOT_ACCEPTED for the rows that no sequence takes.

    Before `commit`. A row that failed behind a draft is not accepted: the slot fails once that row is its first.
    """
    rows = scheduled.rows
    if rows.ahead is None:
        return sampled
    positions = slots.num_tokens[rows.slots] + rows.ahead
    behind = rows.ahead > 0
    # The draft before a row is its slot's token at the position before it.
    drafts = slots.token_ids[rows.slots, np.maximum(positions - 1, 0)]
    matches = np.ones(len(behind), np.bool_)
    (later,) = behind.nonzero()
    before = sampled.valid[later - 1] & (sampled.token_ids[later - 1] == drafts[later])
    ended = slots.ends(rows.slots[later], sampled.token_ids[later - 1], positions[later] - 1)
    matches[later] = before & ~ended & sampled.valid[later]
    accepted = _all_before(matches, behind)
    errors = np.where(accepted, sampled.errors, NOT_ACCEPTED)
    logprobs = sampled.logprobs
    return replace(sampled, errors=errors, logprobs=None if logprobs is None else _kept(logprobs, accepted))


def _all_before(matches: BoolArray, behind: BoolArray) -> BoolArray:
    """Return [Q]: whether a row and all rows of its slot before it match; behind: whether a row is not its first."""
    failures = (~matches).cumsum()
    first = np.maximum.accumulate(np.where(behind, 0, np.arange(len(behind))))
    # First rows always match.
    result: BoolArray = failures == failures[first]
    return result


def _kept(logprobs: RowLogprobs, accepted: BoolArray) -> RowLogprobs | None:
    """Return the logprobs of accepted rows."""
    kept = accepted[logprobs.rows]
    if not kept.any():
        return None
    return RowLogprobs(
        logprobs.rows[kept],
        logprobs.chosen[kept],
        logprobs.ranks[kept],
        logprobs.num_top[kept],
        logprobs.top_ids[kept],
        logprobs.top[kept],
    )
