"""The values that a step computes, and the step result built from them; the same for every kind of executor."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cadenza_common.plan.result import Candidates, LogprobColumns, SlotError, StepResult, StepStatus, StepTimings
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slot_states import SavedStates
from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray, column, float_column

_NONE: Sequence[int] = array("q")
"""A column of a result that has no entries."""
_FIRST = np.zeros(1, np.int64)
NOT_ACCEPTED = -1
"""In place of an error: the row stands behind a draft that was not accepted, and gives no token."""
LATE = -2
"""In place of an error: the mask of the row's grammar is not there yet. The slot computes its last token again."""

WRONG_STATE = -3
"""In place of an error: the slot's recurrent state does not stand where the plan says. The plan is invalid."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Logprobs of the rows that requested them, from the model's own distribution."""

    rows: IntArray
    """[n]."""
    chosen: FloatArray
    """[n]."""
    ranks: IntArray
    """[n], from 1."""
    num_top: IntArray
    """[n]."""
    top_ids: IntArray
    """[n, max(num_top)], best first; row i has num_top[i] entries."""
    top: FloatArray
    """The same shape."""

    def of_rows(self, rows: IntArray) -> RowLogprobs:
        """Return the same logprobs with row i renumbered to rows[i]; rows: [R]."""
        return replace(self, rows=rows[self.rows])


@dataclass(frozen=True, slots=True)
class RowCandidates:
    """The most likely next tokens of the C rows of Scheduled.candidates, in this order."""

    counts: IntArray
    """[C] number of candidates found."""
    token_ids: IntArray
    """[C, widest], best first; row i has counts[i] entries."""
    logprobs: FloatArray
    """The same shape."""
    errors: IntArray
    """[C] SlotError of rows without candidates; 0 for the others."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of Q rows."""

    token_ids: IntArray
    """[Q]; undefined for rows with candidates."""
    errors: IntArray
    """[Q] SlotError of rows that cannot be sampled, or NOT_ACCEPTED: they have no valid token; 0 for the others."""
    logprobs: RowLogprobs | None
    candidates: RowCandidates | None = None

    @property
    def valid(self) -> BoolArray:
        """[Q]: whether the row has not failed, and is accepted."""
        result: BoolArray = self.errors == 0
        return result

    @property
    def late(self) -> BoolArray:
        """[Q]: whether the row is LATE."""
        result: BoolArray = self.errors == LATE
        return result


@dataclass(frozen=True, slots=True)
class Computed:
    """The values that a step has computed."""

    sampled: SampledTokens
    positions: IntArray
    """[Q] positions of the sampled tokens in their sequences."""
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    device_ns: int = 0
    sample_ns: int = 0
    saved: SavedStates | None = None
    """The copies of recurrent states that it made."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that was already done when its launch returned; implements `worker.Launched`."""

    outcome: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.outcome


def make_result(
    step_id: int, scheduled: Scheduled, computed: Computed, timings: StepTimings, digest: bytes
) -> StepResult:
    """Return the result of a step that has run."""
    sampled = computed.sampled
    rows = scheduled.rows
    if scheduled.is_one_each and not len(rows.candidates) and not sampled.errors.any():
        return _result_of_tokens(step_id, scheduled, computed, timings, digest)
    failed = sampled.errors > 0
    taken = scheduled.takes_token(sampled.valid)
    slots, counts = scheduled.sampling_slots, _counts(scheduled, taken)
    if len(scheduled.idle_slots):
        slots = np.concatenate((slots, scheduled.idle_slots))
        counts = np.pad(counts, ((0, 0), (0, len(scheduled.idle_slots))))
        order = np.argsort(slots)
        slots, counts = slots[order], counts[:, order]
    num_tokens, num_drafts, num_accepted = counts
    drafted = num_drafts.any()
    return StepResult(
        step_id=step_id,
        status=StepStatus.OK,
        slots=column(slots),
        num_tokens=column(num_tokens[:0] if (num_tokens == 1).all() else num_tokens),
        token_ids=column(sampled.token_ids[taken]),
        num_drafts=column(num_drafts if drafted else num_drafts[:0]),
        num_accepted=column(num_accepted if drafted else num_accepted[:0]),
        error_slots=column(rows.slots[failed]),
        errors=tuple(SlotError(error) for error in sampled.errors[failed]),
        logprobs=_logprobs(computed, rows.slots),
        prompt_logprobs=computed.prompt_logprobs,
        candidates=_candidates(sampled, scheduled),
        saved_slots=() if computed.saved is None else column(computed.saved.slots),
        saved_positions=() if computed.saved is None else column(computed.saved.positions),
        timings=timings,
        debug_digest=digest,
        num_sequences=len(scheduled.slots),
        num_computed=int(scheduled.num_tokens.sum()),
    )


def _result_of_tokens(
    step_id: int, scheduled: Scheduled, computed: Computed, timings: StepTimings, digest: bytes
) -> StepResult:
    """Return what `make_result` does where each slot has computed one token, and sampled one."""
    sampled, slots, saved = computed.sampled, scheduled.sampling_slots, computed.saved
    return StepResult(
        step_id=step_id,
        slots=column(slots),
        num_tokens=_NONE,
        token_ids=column(sampled.token_ids),
        num_drafts=_NONE,
        num_accepted=_NONE,
        error_slots=_NONE,
        logprobs={} if sampled.logprobs is None else _logprobs(computed, slots),
        saved_slots=() if saved is None else column(saved.slots),
        saved_positions=() if saved is None else column(saved.positions),
        timings=timings,
        debug_digest=digest,
        num_sequences=len(slots),
        num_computed=len(slots),
    )


def _counts(scheduled: Scheduled, taken: BoolArray) -> IntArray:
    """Return [3, R] the tokens, drafts and accepted drafts of each sampling slot; taken: [Q]."""
    tokens = taken.astype(np.int64)
    num_slots, drafted = len(scheduled.sampling_slots), scheduled.drafted
    if drafted is None or drafted.ahead is None:
        return np.stack((tokens, np.zeros((num_slots,), np.int64), np.zeros((num_slots,), np.int64)))
    owner = (drafted.ahead == 0).cumsum() - 1
    behind = drafted.ahead > 0
    counts = [np.bincount(owner[rows], minlength=num_slots) for rows in (taken, behind, behind & taken)]
    return np.stack(counts).astype(np.int64)


def _candidates(sampled: SampledTokens, scheduled: Scheduled) -> dict[int, Candidates]:
    """Return one entry for each slot that requested candidates and has not failed, in slot order."""
    found = sampled.candidates
    if found is None:
        return {}
    rows = scheduled.rows
    slots, valid = rows.slots[rows.candidates], sampled.valid[rows.candidates]
    return {
        int(slots[i]): Candidates(
            column(found.token_ids[i, : found.counts[i]]), float_column(found.logprobs[i, : found.counts[i]])
        )
        for i in np.flatnonzero(valid)
    }


def _logprobs(computed: Computed, slots: IntArray) -> dict[int, LogprobColumns]:
    """Return one entry for each slot that requested logprobs and has a token, in slot order.

    slots: [Q], of the rows: those of a slot's tokens follow each other, and make one entry.
    """
    logprobs, valid = computed.sampled.logprobs, computed.sampled.valid
    if logprobs is None:
        return {}
    (wanted,) = valid[logprobs.rows].nonzero()
    if not len(wanted):
        return {}
    rows, num_top = logprobs.rows[wanted], logprobs.num_top[wanted]
    owners, positions = slots[rows], computed.positions[rows].tolist()
    begins = np.concatenate((_FIRST, (owners[1:] != owners[:-1]).nonzero()[0] + 1))
    # Columns of all slots, of which each has a part: to make a column takes longer than to cut it.
    chosen, ranks = float_column(logprobs.chosen[wanted]), column(logprobs.ranks[wanted])
    kept = np.arange(logprobs.top_ids.shape[1]) < num_top[:, None]
    top_ids, top = column(logprobs.top_ids[wanted][kept]), float_column(logprobs.top[wanted][kept])
    tops = [0, *num_top.cumsum().tolist()]
    return {
        slot: LogprobColumns(
            positions[first],
            chosen[first:end],
            ranks[first:end],
            count,
            top_ids[tops[first] : tops[end]],
            top[tops[first] : tops[end]],
        )
        for slot, count, first, end in zip(
            owners[begins].tolist(), num_top[begins].tolist(), begins.tolist(), [*begins[1:].tolist(), len(wanted)],
            strict=True,
        )
    }  # fmt: skip
