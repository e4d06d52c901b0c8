"""Plans in few words, for tests of the executor without gRPC."""

from __future__ import annotations

from typing import Any

import numpy as np

from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.slots import Slots


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def sequence(slot: int, tokens: list[int], blocks: list[int], computed: int = 0, **fields: Any) -> AdmittedSequence:
    sampling = fields.pop("sampling", SequenceSampling())
    prompt = fields.pop("prompt", len(tokens))
    return AdmittedSequence(slot, ints(*tokens), prompt, computed, ints(*blocks), sampling, **fields)


def plan(**fields: Any) -> StepPlan:
    """A plan; appends, given, forks and scheduled as made by `columns` and `scheduled`."""
    return StepPlan(**{"step_id": 1, "epoch": 1} | flat(**fields))


def flat(**fields: Any) -> dict[str, Any]:
    """The fields of a plan; its parts with columns are written as one."""
    flattened = {}
    for name, value in fields.items():
        if name in _PARTS:
            flattened |= dict(zip(_PARTS[name], value, strict=True))
        else:
            flattened[name] = list(value) if name == "admitted" else value
    return flattened


_PARTS = {
    "appends": ("append_slots", "append_block_ids"),
    "given": ("given_slots", "given_token_ids"),
    "forks": ("fork_slots", "fork_source_slots"),
    "scheduled": ("scheduled_slots", "scheduled_num_tokens", "scheduled_samples"),
}


def scheduled(*rows: tuple[int, int, bool]) -> list[list[int]]:
    """Slots, tokens of each, and whether they sample."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], []]


def columns(*pairs: tuple[int, int]) -> list[list[int]]:
    """Slots and their values: blocks to append, given tokens, sources of forks."""
    return [list(column) for column in zip(*pairs, strict=True)] if pairs else [[], []]


def run(slots: Slots, step: StepPlan, tokens: list[int]) -> list[int]:
    """Run a step that samples these; returns the slots computed."""
    slots.apply(step)
    got = slots.schedule(step)
    slots.commit(got, ints(*tokens), np.ones(len(tokens), np.bool_))
    return got.slots.tolist()
