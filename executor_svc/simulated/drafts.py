"""Drafts of the simulated executor: each is the token that follows, with a fixed probability.

What a real source finds depends on texts and weights; here the share of right drafts is an input. Masks (allowed
tokens, bad words, min_tokens) are not known to it, so that a few drafts more are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.simulated.hashing import draw_hashes, mix
from executor_svc.simulated.ranking import Ranking
from executor_svc.simulated.tokens import SimulatedContext
from executor_svc.speculation.drafts import Drafts

_RESOLUTION = 1 << 24


class AcceptanceSource:
    """Implements `DraftSource`. Which drafts are right depends on the tokens before them alone."""

    def __init__(self, vocab_size: int, acceptance: float, hash_of: Callable[[int], bytes] = lambda index: b"") -> None:
        """acceptance: probability that a draft is right, if those before it are; 0 to 1. hash_of: an adapter's content
        by its index."""
        self._hash_of = hash_of
        self._vocab_size = vocab_size
        self._threshold = round(acceptance * _RESOLUTION)
        self._contexts: dict[int, SimulatedContext | None] = {}
        """By slot; None: it has had no drafts yet."""

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""
        self._contexts[slot] = None

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""
        for slot in slots.tolist():
            self._contexts.pop(slot, None)

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""
        self._contexts.clear()

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return True

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`; always as many as are allowed."""
        drafts: list[int] = []
        for slot, count in zip(rows.tolist(), most.tolist(), strict=True):
            context = self._contexts[slot]
            if context is None:
                context = SimulatedContext(adapter_hash=self._hash_of(int(slots.adapter_index[slot])))
                self._contexts[slot] = context
            for token_id in slots.token_ids[slot, context.length : slots.num_tokens[slot]].tolist():
                context.append(token_id)
            drafts += self._draft(slots, slot, copy(context), count)
        return Drafts(most.copy(), np.array(drafts, np.int64))

    def _draft(self, slots: Slots, slot: int, context: SimulatedContext, count: int) -> list[int]:
        sampling, drafts = slots.sampling, []
        row, best = np.array([slot]), np.zeros(1, np.int64)
        for _ in range(count):
            hashes = np.array([context.logits_hash()], np.uint64)
            is_right = int(mix(hashes)[0]) % _RESOLUTION < self._threshold
            drawn = draw_hashes(
                hashes, sampling["seed"][row], sampling["sample_index"][row], sampling["temperature"][row] > 0
            )
            token = int(Ranking(drawn, self._vocab_size).tokens(best, best)[0])
            drafts.append(token if is_right else (token + 1) % self._vocab_size)
            context.append(drafts[-1])
        return drafts
