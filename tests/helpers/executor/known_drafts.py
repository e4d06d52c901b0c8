"""A source of drafts that knows what follows, and is wrong now and then. For tests only."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.speculation.drafts import Drafts


class KnownDrafts:
    """Implements `DraftSource`: drafts are the tokens of known outputs, a share of them replaced by others."""

    def __init__(
        self, known: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int, *, acceptance: float
    ) -> None:
        """known: prompts with their outputs; acceptance: the share of drafts that are right."""
        self._next: dict[tuple[int, ...], int] = {}
        for prompt, output in known:
            tokens = [*prompt, *output]
            for index in range(len(prompt), len(tokens)):
                self._next[tuple(tokens[:index])] = tokens[index]
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._rng = random.Random(0)
        self.num_proposed = 0

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""

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
        """As in `DraftSource`: sometimes fewer than are allowed."""
        counts, drafts = [], []
        for slot, count in zip(rows.tolist(), most.tolist(), strict=True):
            tokens = slots.token_ids[slot, : slots.num_tokens[slot]].tolist()
            num_before = len(drafts)
            for _ in range(count if self._rng.random() < 0.8 else self._rng.randint(0, count)):
                follows = self._next.get(tuple(tokens), -1)
                if self._rng.random() > self._acceptance or follows < 0:
                    follows = self._rng.randrange(self._vocab_size)
                tokens.append(follows)
                drafts.append(follows)
            counts.append(len(drafts) - num_before)
        self.num_proposed += len(drafts)
        return Drafts(np.array(counts, np.int64), np.array(drafts, np.int64))
