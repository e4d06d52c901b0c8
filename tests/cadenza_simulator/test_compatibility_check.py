"""A load test is accepted for a fit only if it matches the recording."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.results import LoadTestFile
from cadenza_simulator.recordings import RecordedRun, check_compatible
from tests.helpers.loadtest.loadtest_runs import made_up_file
from tests.helpers.loadtest.made_recordings import COSTS, recording

SERVER = {"model": "toy", "executors": [{"device": "cpu"}]}


@pytest.fixture(scope="module")
def made() -> RecordedRun:
    """Of 200 requests with prompts of 10 tokens, and a warm-up; begun before the runs of `made_up_file`."""
    return replace(recording(COSTS, count=30), started_unix_s=1.7e9 - 5, prompt_lens=(3,) * 4 + (10,) * 200)


def of(**more: Any) -> LoadTestFile:
    return made_up_file("a", [1], **{"server": SERVER, **more})


@pytest.mark.slow
def test_its_own_load_test_is_taken(made: RecordedRun) -> None:
    check_compatible(made, of(), "a.json")
    check_compatible(made, of(server=None), "a.json")
    check_compatible(replace(made, started_unix_s=1.7e9 + 5), of(), "a.json")


@pytest.mark.slow
def test_another_ones_is_not(made: RecordedRun) -> None:
    cases = [
        (made, of(server={**SERVER, "model": "demo"}), "its server had the model demo, the recording has toy"),
        (
            made,
            of(server={**SERVER, "executors": [{"device": "H"}]}),
            "its executors ran on H, the recorded one on cpu",
        ),
        (replace(made, started_unix_s=1.7e9 + 3600), of(), "it began 3,600 s before the recording"),
        (
            replace(made, prompt_lens=(10,) * 5 + (11,) * 500),
            of(),
            "completed requests are not in the recording, such as one",
        ),
    ]
    for found, file, message in cases:
        with pytest.raises(LoadTestError, match=f"--loadtest a.json: does not match the recording: .*{message}"):
            check_compatible(found, file, "a.json")
