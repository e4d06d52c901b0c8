"""A trial of the search for the highest rate: how long it is, and whether its rate holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.rate_trial import at_rate, judge
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.settings import LoadSettings, make_settings
from tests.helpers.loadtest.loadtest_runs import columns

DUE_S = np.arange(1000) / 10
"""When requests are due: ten a second."""


def served(latency_s: np.ndarray | float) -> RequestColumns:
    return columns(due_s=DUE_S, first_s=DUE_S + latency_s, last_s=DUE_S + latency_s)


def wanted(**given: object) -> LoadSettings:
    return make_settings({"find_max_rate": True, "slo": "ttft=1", **given})


@pytest.mark.parametrize(
    ("given", "rate", "num_requests", "duration_s"),
    [
        ({}, 47.0, 47 * 60, None),
        ({}, 0.5, 100, None),
        ({"num_requests": "7"}, 47.0, 7, None),
        ({"duration_s": "2.5"}, 0.5, 2, None),
        ({"duration_s": "2.5"}, 100.0, 250, None),
        ({"num_requests": "7", "duration_s": "3"}, 1.0, 7, 3.0),
    ],
    ids=str,
)
def test_a_trial_is_as_long_as_requested(
    given: dict[str, object], rate: float, num_requests: int, duration_s: float | None
) -> None:
    trial = at_rate(wanted(**given), rate, seconds=60, num_requests=100)
    assert (trial.request_rate, trial.num_requests, trial.duration_s) == (rate, num_requests, duration_s)


def test_a_file_is_sent_whole(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt_tokens": 5, "output_len": 2}\n' * 3, encoding="utf-8")
    trial = at_rate(wanted(workload=str(file), duration_s="9"), 4.0, seconds=60, num_requests=100)
    assert (trial.num_requests, trial.duration_s) == (None, 9.0)


def test_a_rate_that_keeps_the_limits_holds() -> None:
    found = judge([served(0.5)], wanted())
    assert (found.held, found.share, found.kept_up) == (True, 1.0, True)
    assert judge([served(np.where(DUE_S < 10, 5.0, 0.5))], wanted()).held, "the first tenth is not judged"
    assert judge([served(np.where(DUE_S < 30, 5.0, 0.5))], wanted(warm_up_s="30")).held, "nor is the warm-up"
    assert not judge([served(np.where(DUE_S < 30, 5.0, 0.5))], wanted()).held
    assert judge([served(np.where(DUE_S > 8, 5.0, 0.5))], wanted(window="0:8")).held, "a window says all"


def test_the_last_third_is_judged_alone() -> None:
    late = served(np.where(DUE_S > 99, 5.0, 0.5))
    found = judge([late], wanted(slo_share="0.98"))
    assert found.share > 0.98
    assert not found.held


def test_a_server_that_falls_behind_does_not_hold() -> None:
    """It does five a second; a generous limit is kept for as long as the run lasts."""
    behind = columns(due_s=DUE_S, first_s=DUE_S + 0.1, last_s=np.arange(1000) / 5)
    found = judge([behind], wanted())
    assert (found.held, found.share, found.kept_up) == (False, 1.0, False)
    assert not judge([behind], wanted(window="all")).held
    assert not judge([served(0.5), behind], wanted()).held, "every repetition keeps up"


def test_without_limits_there_is_nothing_to_judge() -> None:
    with pytest.raises(LoadTestError, match="--find-max-rate needs --slo"):
        judge([served(0.5)], make_settings({}))
