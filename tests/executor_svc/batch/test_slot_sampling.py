"""Which slots take the most likely token as it is, and what the parameters of a slot need of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cadenza_common.plan.plan import AdmittedSequence
from cadenza_common.plan.sampling import COLUMNS, Need, SequenceSampling
from executor_svc.batch.slot_sampling import SlotSampling
from executor_svc.plan.limits import Limits

LIMITS = Limits(2, 2, 64, 32, 50, 8, 4, 8, 0, 2)


def admitted(**fields: Any) -> SlotSampling:
    """Slot 1 with these parameters."""
    slots = SlotSampling(LIMITS)
    slots.admit(AdmittedSequence(1, np.arange(5), 3, 4, np.arange(2), SequenceSampling(**fields)))
    return slots


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, True),
        ({"seed": 5, "top_k": 3, "min_p": 0.1}, True),
        ({"stop_token_ids": np.array([3])}, True),
        ({"temperature": 0.5}, False),
        ({"repetition_penalty": 1.5}, False),
        ({"num_logprobs": 0}, False),
        ({"num_candidates": 4}, False),
        ({"allowed_token_ids": np.array([3])}, False),
        ({"stop_token_ids": np.array([3]), "min_tokens": 1}, False),
    ],
    ids=str,
)
def test_only_a_row_without_any_change_or_report_is_greedy(fields: dict[str, Any], greedy: bool) -> None:
    slots = admitted(**fields)
    assert slots.greedy.tolist() == [False, greedy]


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, set()),
        ({"temperature": 1.0}, {Need.DRAW}),
        ({"top_k": 3}, {Need.SEARCH}),
        ({"top_p": 0.5}, {Need.SEARCH}),
        ({"min_p": 0.1}, {Need.FLOOR}),
        ({"top_n_sigma": 1.0}, {Need.FLOOR}),
        ({"top_n_sigma": -1.0}, set()),
        ({"presence_penalty": -1.0}, {Need.COUNTS}),
        ({"num_logprobs": 0}, {Need.REPORT}),
    ],
    ids=str,
)
def test_what_parameters_need_of_a_step(fields: dict[str, Any], needs: set[Need]) -> None:
    slots = admitted(**fields)
    assert {need for need in Need if slots.on(need)[1]} == needs
    assert not any(slots.on(need)[0] for need in Need)


def test_a_slot_that_was_never_used_has_all_parameters_off() -> None:
    slots = SlotSampling(LIMITS)
    for column in COLUMNS.values():
        assert slots[column.name].dtype == column.dtype
        assert (slots[column.name] == column.off).all()
