"""The values that a step computes, and the step result built from them; the same for every kind of executor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from executor_svc.batch.slots import Scheduled
from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray
from executor_svc.plan.plan import SlotCandidates, SlotError, SlotLogprobs, StepResult, StepStatus, StepTimings


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
    """The sampled tokens of R rows."""

    token_ids: IntArray
    """[R]; undefined for rows with candidates."""
    errors: IntArray
    """[R] SlotError of rows that cannot be sampled, which have no valid token; 0 for the others."""
    logprobs: RowLogprobs | None
    candidates: RowCandidates | None = None

    @property
    def valid(self) -> BoolArray:
        """[R]: whether the row has not failed."""
        result: BoolArray = self.errors == 0
        return result


@dataclass(frozen=True, slots=True)
class Computed:
    """The values that a step has computed."""

    sampled: SampledTokens
    positions: IntArray
    """[R] positions of the sampled tokens in their sequences."""
    prompt_logprobs: tuple[SlotLogprobs, ...] = ()
    device_ns: int = 0
    sample_ns: int = 0


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
    rows = scheduled.sampling_slots
    valid = sampled.valid
    failed = ~valid
    taken = scheduled.takes_token(valid)
    slots, num_tokens = rows, taken.astype(np.int64)
    if len(scheduled.idle_slots):
        slots = np.concatenate((rows, scheduled.idle_slots))
        num_tokens = np.concatenate((num_tokens, np.zeros(len(scheduled.idle_slots), np.int64)))
        order = np.argsort(slots)
        slots, num_tokens = slots[order], num_tokens[order]
    return StepResult(
        step_id=step_id,
        status=StepStatus.OK,
        slots=slots,
        num_tokens=num_tokens[:0] if num_tokens.all() else num_tokens,
        token_ids=sampled.token_ids[taken],
        error_slots=rows[failed],
        errors=tuple(SlotError(error) for error in sampled.errors[failed]),
        logprobs=_logprobs(computed, rows),
        prompt_logprobs=computed.prompt_logprobs,
        candidates=_candidates(sampled, scheduled),
        timings=timings,
        debug_digest=digest,
        num_sequences=len(scheduled.slots),
        num_computed=int(scheduled.num_tokens.sum()),
    )


def _candidates(sampled: SampledTokens, scheduled: Scheduled) -> tuple[SlotCandidates, ...]:
    """Return one entry for each slot that requested candidates and has not failed, in slot order."""
    found = sampled.candidates
    if found is None:
        return ()
    slots, valid = scheduled.sampling_slots[scheduled.candidates], sampled.valid[scheduled.candidates]
    return tuple(
        SlotCandidates(int(slots[i]), found.token_ids[i, : found.counts[i]], found.logprobs[i, : found.counts[i]])
        for i in np.flatnonzero(valid)
    )


def _logprobs(computed: Computed, slots: IntArray) -> tuple[SlotLogprobs, ...]:
    """Return one entry for each slot that requested logprobs and has a token, in slot order.

    slots: [R], the sampling slots.
    """
    logprobs, valid = computed.sampled.logprobs, computed.sampled.valid
    if logprobs is None:
        return ()
    return tuple(
        SlotLogprobs(
            slot=int(slots[row]),
            start=int(computed.positions[row]),
            chosen_logprobs=logprobs.chosen[i : i + 1],
            chosen_ranks=logprobs.ranks[i : i + 1],
            num_top=int(logprobs.num_top[i]),
            top_token_ids=logprobs.top_ids[i, : logprobs.num_top[i]],
            top_logprobs=logprobs.top[i, : logprobs.num_top[i]],
        )
        for i, row in enumerate(logprobs.rows)
        if valid[row]
    )
