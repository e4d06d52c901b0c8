"""Drafts from a recorded run, right with a stated probability: what a source of that acceptance would give.

Random weights have no texts to guess. So a run without drafts is recorded, and its tokens are the drafts of the next
runs; each is spoiled with the probability that a draft is wrong.

`python -m benchmarks.serving.oracle OPTIONS` is the executor service with this source. All options are the executor's;
the environment names the file of the run and the seed of the wrong drafts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.speculation.drafts import Drafts

TEXTS, SEED = "BENCHMARK_ORACLE_TEXTS", "BENCHMARK_ORACLE_SEED"
"""Of the environment."""


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A request without drafts."""

    prompt: list[int]
    """Token ids; no other text begins with them."""
    output: list[int]
    acceptance: float
    """Probability that a draft of this text is right."""


def save_texts(path: Path, texts: Iterable[RecordedText]) -> None:
    """Write texts for `OracleSource`."""
    path.write_text(json.dumps([asdict(text) for text in texts]))


class OracleSource:
    """Implements `DraftSource`. Which drafts are right depends on text and position alone."""

    def __init__(self, path: Path, seed: int) -> None:
        """path: of `save_texts`; all prompts have one length."""
        texts = [RecordedText(**each) for each in json.loads(path.read_text())]
        (self._prompt_len,) = {len(text.prompt) for text in texts}
        self._texts = {tuple(text.prompt): _spoiled(text, seed + index) for index, text in enumerate(texts)}
        self._of_slot: dict[int, IntArray] = {}

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return True

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        """As in `DraftSource`."""
        made = [
            self._text(slots, slot)[known : known + count]
            for slot, known, count in zip(rows.tolist(), slots.num_tokens[rows].tolist(), most.tolist(), strict=True)
        ]
        return Drafts(np.array([len(tokens) for tokens in made], np.int64), np.concatenate(made))

    def _text(self, slots: Slots, slot: int) -> IntArray:
        if slot not in self._of_slot:
            prompt = tuple(slots.token_ids[slot, : self._prompt_len].tolist())
            self._of_slot[slot] = self._texts.get(prompt, np.zeros(0, np.int64))
        return self._of_slot[slot]

    def follow(self, plan: StepPlan) -> None:
        """As in `DraftSource`."""

    def admitted(self, slot: int, scope: int) -> None:
        """As in `DraftSource`."""
        self._of_slot.pop(slot, None)

    def released(self, slots: IntArray) -> None:
        """As in `DraftSource`."""

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        """As in `DraftSource`."""

    def clear(self) -> None:
        """As in `DraftSource`."""
        self._of_slot.clear()


def _spoiled(text: RecordedText, seed: int) -> IntArray:
    """The prompt and the drafts behind it; a wrong draft is the token id beside the right one."""
    output = np.array(text.output, np.int64)
    right: BoolArray = np.random.default_rng(seed).random(len(output)) < text.acceptance
    return np.concatenate((np.array(text.prompt, np.int64), np.where(right, output, output ^ 1)))


if __name__ == "__main__":
    from executor_svc.__main__ import main

    sys.exit(main(OracleSource(Path(os.environ[TEXTS]), int(os.environ[SEED]))))
