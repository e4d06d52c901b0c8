"""Drafts of a head that reads its target's hidden states, such as EAGLE-3.

After each step the head computes a row for every position whose states the step has and whose next token is known by
then: row p of a sequence reads the states at p and the token at p + 1. The last row's result is where the sequence's
next drafts begin; behind it the head reads its own results. Its keys and values are further layers of the target's
blocks, at slot p, so that prefix hits, copies, forks and swaps carry them.

States are there in the step that computes them, and only then. So rows that a step had no head for stay missing, and a
sequence behind such a gap has no drafts. Two single rows may be others than they should be: before a prefix hit's end,
where the head read the token that followed then, and at a fork, which shares its source's row. One of many rows that
attention reads, it makes a draft a little worse, and no token wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.forward_batch import ForwardBatch, flat_batch
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.sample_step import sample_drafts
from executor_svc.speculation.drafts import Drafts
from executor_svc.worker.draft_kv import DraftKV

_NEVER = -1


class HeadRunner(Protocol):
    """Runs a head over the states of its target's last step, as `cpu.head_runner.CpuHeadRunner` does."""

    functions: RowFunctions
    """The device's functions for sampling."""
    hidden_size: int
    dtype: torch.dtype

    def combine(self, num_tokens: int) -> Tensor:
        """Return the hidden states [T, hidden] of the target's last step, of num_tokens tokens; once for a step."""
        ...

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """Write keys and values of rows, and return their results [T, hidden].

        batch: positions p, with the tokens at p + 1; hidden: [T, hidden], from `combine`, or results of the rows
        before.
        """
        ...

    def logits(self, results: Tensor) -> tuple[Tensor, IntArray]:
        """Return the logits [R, head's vocabulary] of results [R, hidden], and the target's id [R] of each's largest.

        The id is -1 for a row that cannot be sampled.
        """
        ...

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits [R, vocab_size] by the target's ids, -inf for ids that the head lacks."""
        ...


class HeadSource:
    """Implements `DraftSource`; for use by one thread."""

    def __init__(self, runner: HeadRunner, limits: Limits) -> None:
        """runner: of the head, over its own layers of the cache."""
        self._runner = runner
        self._kv = DraftKV(limits)
        self._results = torch.zeros(limits.num_slots, runner.hidden_size, dtype=runner.dtype)
        # By slot: the number of its tokens for which its result, of the row before the last token's, is the newest.
        self._ready_at = np.full(limits.num_slots, _NEVER)

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""
        self._kv.follow(plan)
        for slot in (*(sequence.slot for sequence in plan.admitted), *plan.fork_slots):
            self._kv.forget(slot)
            self._ready_at[slot] = _NEVER

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""
        self._ready_at.fill(_NEVER)

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`: compute the head's rows of the step."""
        rows, ends = scheduled.slots, scheduled.num_tokens.cumsum()
        counts = np.clip(slots.num_tokens[rows] - 1 - starts, 0, scheduled.num_tokens)
        # Prompts may be other sequences' prefixes.
        wanted = (slots.max_drafts[rows] > 0) | (starts < slots.num_prompt_tokens[rows])
        counts[~wanted] = 0
        (computing,) = counts.nonzero()
        present = self._kv.num_computed(slots, rows[computing])
        # A row may be missing: a fork's first.
        counts[computing[present < starts[computing] - 1]] = 0
        (computing,) = counts.nonzero()
        if not len(computing):
            return
        rows, starts, counts, first = (
            rows[computing], starts[computing], counts[computing], (ends - scheduled.num_tokens)[computing]
        )  # fmt: skip
        _, places = spans(first, counts)
        combined = self._runner.combine(int(ends[-1]))[torch.from_numpy(places)]
        results = self._runner.forward(head_batch(slots, rows, starts, counts), combined)
        self._results[torch.from_numpy(rows)] = results[torch.from_numpy(counts.cumsum() - 1)]
        self._ready_at[rows] = starts + counts + 1
        self._kv.computed(slots, rows, starts + counts)

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return True

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`: as many as are allowed, for slots without a gap."""
        known = slots.num_tokens[rows]
        counts = np.where(self._ready_at[rows] == known, most, 0)
        results, index = self._results[torch.from_numpy(rows[counts > 0])], 0
        while len(active := np.flatnonzero(counts > index)):
            if index:
                ones = np.ones(len(active), np.int64)
                batch = head_batch(slots, rows[active], known[active] + index - 2, ones)
                results = self._runner.forward(batch, results)
            logits, best = self._runner.logits(results)
            spread = self._runner.spread
            sampled = sample_drafts(slots, rows[active], index, best, lambda: spread(logits), self._runner.functions)  # noqa: B023
            valid = sampled.valid
            slots.token_ids[rows[active[valid]], known[active[valid]] + index] = sampled.token_ids[valid]
            counts[active[~valid]] = index
            index += 1
            results = results[torch.from_numpy(counts[active] > index)].clone()
        made = [slots.token_ids[slot, at : at + n] for slot, at, n in zip(rows, known, counts, strict=True)]
        return Drafts(counts, np.concatenate(made).astype(np.int64))


def head_batch(slots: Slots, rows: IntArray, starts: IntArray, counts: IntArray) -> ForwardBatch:
    """Return the head's rows starts[i] to starts[i] + counts[i] - 1 of the slots rows[i]: tokens are those behind."""
    batch = flat_batch(slots, rows, starts, counts, counts[:0])
    owner = np.repeat(rows, counts)
    return replace(
        batch, token_ids=torch.from_numpy(slots.token_ids[owner, batch.positions.numpy() + 1].astype(np.int64))
    )
