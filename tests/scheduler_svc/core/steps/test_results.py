"""Results that contradict their plan are refused before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cadenza_common.plan.result import SlotError, StepResult, StepStatus
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.steps.results import check_result
from tests.helpers.core.core_bench import Bench


def decoding(num_requests: int = 2) -> Bench:
    """Requests of which one step is in flight, after their prompts."""
    bench = Bench()
    for index in range(num_requests):
        bench.add(str(index), 3, max_tokens=9)
    bench.step()
    assert bench.plan() is not None
    return bench


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": [0, 0], "token_ids": [5, 6]}, "tokens of slots"),
        ({"slots": [0, 3], "token_ids": [5, 6]}, "tokens of slots"),
        ({"slots": [0, 1], "token_ids": [5]}, "1 tokens of 2 slots"),
        ({"slots": [0, 1], "num_tokens": [1, 1], "token_ids": [5]}, "do not add up"),
        ({"slots": [0, 1], "num_tokens": [1], "token_ids": [5]}, "do not add up"),
        ({"slots": [0, 1], "num_tokens": [2, 0], "token_ids": [5, 6]}, "where 0 were allowed"),
        ({"slots": [0], "token_ids": [5]}, "slot 1 sampled nothing"),
        ({"slots": [0], "token_ids": [5], "error_slots": [1], "errors": []}, "0 errors of slots"),
        ({"slots": [0], "token_ids": [5], "error_slots": [3], "errors": [SlotError.GRAMMAR]}, "errors of slots"),
    ],
    ids=str,
)
def test_a_result_that_does_not_fit_its_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    bench = decoding()
    step = bench.lane.inflight[0]
    result = StepResult(step.plan.step_id, StepStatus.OK, slots=[0, 1], token_ids=[5, 6])
    check_result(bench.lane, step, result)
    with pytest.raises(InvariantError, match=message):
        check_result(bench.lane, step, replace(result, **changes))
