"""A head's drafts over random histories of slots that come, pause and go: those of the head over each whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.executor_svc.gpu.drafted_steps import Outputs
from tests.executor_svc.gpu.drafts.test_heads import eagle3, undrafted
from tests.executor_svc.gpu.drafts.watched_head import WatchedHead
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long

NUM_SLOTS, LAST = 5, 40


class History:
    """Plans of chunks, decodes and pauses, for the slots as the host knows them."""

    def __init__(self, stepper: Stepper, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.slots: Any = stepper.executor.slots  # type: ignore[attr-defined]
        self.texts: dict[int, list[int]] = {}
        """Prompts by slot."""
        self.ended: list[tuple[list[int], list[int]]] = []
        """Prompts, and what followed, of sequences that have left."""

    def below(self, end: int) -> int:
        return int(self.rng.integers(end))

    def next_plan(self, found: Outputs) -> dict[str, Any]:
        slots, fields = self.slots, {"decode_ready": self.below(8) > 0, "max_drafts": self.below(4)}
        live = np.flatnonzero(slots.admitted).tolist()
        released = [slot for slot in live if slots.stopped[slot] or not self.below(15)]
        for slot in released:
            self.ended.append((self.texts.pop(slot), found.tokens.pop(slot, [])))
        rows, admitted = [], []
        for slot in sorted({*range(NUM_SLOTS)} - {*live} | {*released})[: self.below(3)]:
            self.texts[slot] = self.rng.integers(3, 20, 2 + self.below(12)).tolist()
            text = self.texts[slot]
            admitted.append(
                sequence(slot, text, Stepper.blocks(slot), max_drafts=self.below(2) * 3, max_len=LAST - self.below(9))
            )
            rows.append((slot, len(text)))
        staying = [slot for slot in live if slot not in released]
        rows += [(slot, int(slots.num_tokens[slot] - slots.num_computed_tokens[slot])) for slot in staying]
        chunks = []
        for slot, left in rows:
            if left > 1:
                count = left if self.below(3) else 1 + self.below(left - 1)
                chunks.append((slot, count, count == left))
        held = [slot for slot in staying if slots.held[slot]]
        return fields | {
            "released_slots": ints(*released),
            "admitted": tuple(admitted),
            "scheduled": scheduled(*chunks),
            "held_slots": ints(*(slot for slot in staying if slot not in held and not self.below(12))),
            "resumed_slots": ints(*(slot for slot in held if self.below(2))),
        }


@pytest.mark.parametrize("seed", short_and_long(range(4), [1]))
def test_drafts_are_those_of_whole_texts(seed: int, tmp_path: Path) -> None:
    made = eagle3(tmp_path)
    stepper, found = made.stepper(num_slots=NUM_SLOTS), Outputs()
    watched, history = WatchedHead(stepper, made.reference()), History(stepper, seed)
    for _ in range(18):
        found.add(stepper.step(**history.next_plan(found)))
    assert len(watched.proposals) > 10
    assert all(drafts == expected for _, drafts, expected in watched.proposals)
    assert found.num_accepted > 5
    history.ended += [(text, found.tokens[slot]) for slot, text in history.texts.items()]
    for text, tokens in history.ended:
        if tokens:
            begun = {"admitted": (sequence(0, text, Stepper.blocks(0)),), "scheduled": scheduled((0, len(text), True))}
            assert undrafted(made.cpu, begun, len(tokens)).tokens[0][: len(tokens)] == tokens
