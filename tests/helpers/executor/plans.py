"""Plans in few words, for tests of the executor without gRPC."""

from __future__ import annotations

from typing import Any

import numpy as np

from executor_svc.batch.slots import Slots
from executor_svc.plan.plan import AdmittedSequence, ScheduledTokens, SlotColumns, StepPlan
from executor_svc.plan.sampling import SequenceSampling


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def sequence(slot: int, tokens: list[int], blocks: list[int], computed: int = 0, **fields: Any) -> AdmittedSequence:
    sampling = fields.pop("sampling", SequenceSampling())
    prompt = fields.pop("prompt", len(tokens))
    return AdmittedSequence(slot, ints(*tokens), prompt, computed, ints(*blocks), sampling, **fields)


def plan(**fields: Any) -> StepPlan:
    return StepPlan(**{"step_id": 1, "epoch": 1} | fields)


def scheduled(*rows: tuple[int, int, bool]) -> ScheduledTokens:
    slots, counts, samples = zip(*rows, strict=True)
    return ScheduledTokens(ints(*slots), ints(*counts), np.array(samples, np.bool_))


def columns(*pairs: tuple[int, int]) -> SlotColumns:
    """Slots and their values: blocks to append, given tokens, sources of forks."""
    return SlotColumns(ints(*(slot for slot, _ in pairs)), ints(*(value for _, value in pairs)))


def run(slots: Slots, step: StepPlan, tokens: list[int]) -> list[int]:
    """Run a step that samples these; returns the slots computed."""
    slots.apply(step)
    got = slots.schedule(step)
    slots.commit(got, ints(*tokens), np.ones(len(tokens), np.bool_))
    return got.slots.tolist()
