"""Drafts of a smaller model with the target's vocabulary.

The model computes the tokens that it lacks, then drafts token by token, sampled as `sampling.sample_step` does.

Its keys and values are further layers of the target's blocks. They are computed only when a slot is about to have
drafts, so a model whose drafts do not pay costs nothing. How much of a block is there moves with the block: prefix
hits, copies, forks and swaps carry it.
"""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.forward_batch import ForwardBatch, flat_batch
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.sample_step import sample_drafts
from executor_svc.speculation.drafts import Drafts
from executor_svc.worker.draft_kv import DraftKV
from executor_svc.worker.step import Runner


class DraftModelSource:
    """Implements `DraftSource`; for use by one thread."""

    def __init__(self, runner: Runner, limits: Limits) -> None:
        """runner: of the draft model, over its own layers of the cache."""
        self._runner = runner
        self._max_tokens = limits.max_num_batched_tokens
        self._kv = DraftKV(limits)

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""
        self._kv.follow(plan)

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""
        self._kv.forget(slot)

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return True

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`: as many as are allowed.

        A slot has none while the tokens that the model lacks, all slots together, are over max_num_batched_tokens: each
        call computes as many, of the first slots first.
        """
        known = slots.num_tokens[rows]
        context = self._kv.num_computed(slots, rows)
        ends = (known - context).cumsum()
        lacking = np.clip(self._max_tokens - (ends - (known - context)), 0, known - context)
        counts = np.where(context + lacking == known, most, 0)
        if not counts.any() and not lacking.any():
            return Drafts(counts, counts[:0])
        sampled = self._first(slots, rows, context, lacking, counts > 0)
        self._kv.computed(slots, rows[lacking > 0], (context + lacking)[lacking > 0])
        index = -1
        while len(active := np.flatnonzero(counts > (index := index + 1))):
            if index:
                sampled = self._next(slots, rows[active], index)
            valid = sampled.valid
            slots.token_ids[rows[active[valid]], known[active[valid]] + index] = sampled.token_ids[valid]
            counts[active[~valid]] = index
        made = [slots.token_ids[slot, at : at + n] for slot, at, n in zip(rows, known, counts, strict=True)]
        drafts = Drafts(counts, np.concatenate(made).astype(np.int64))
        self._kv.drafted(rows, known, counts, drafts.token_ids)
        return drafts

    def _first(
        self, slots: Slots, rows: IntArray, context: IntArray, lacking: IntArray, drafts: BoolArray
    ) -> SampledTokens:
        """Compute the tokens that the model lacks; return a draft for each of the slots that have any."""
        computing = lacking > 0
        ends = lacking.cumsum()[drafts] - 1
        batch = flat_batch(slots, rows[computing], context[computing], lacking[computing], ends)
        return self._sampled(slots, batch, rows[drafts], 0)

    def _next(self, slots: Slots, rows: IntArray, index: int) -> SampledTokens:
        """Compute the last draft of slots that have `index` of them; return the next one."""
        ones = np.ones(len(rows), np.int64)
        context = slots.num_tokens[rows] + index - 1
        return self._sampled(slots, flat_batch(slots, rows, context, ones, np.arange(len(rows))), rows, index)

    def _sampled(self, slots: Slots, batch: ForwardBatch, rows: IntArray, index: int) -> SampledTokens:
        """Run a batch and sample for these slots, as the target does after `index` drafts."""
        hidden = self._runner.forward(batch)
        logits = self._runner.logits(hidden, batch.logits_rows)
        best = self._runner.argmax(logits)
        return sample_drafts(slots, rows, index, best, lambda: logits, self._runner.functions)
