"""A short run of the wire's fuzz on each service; `python -m tests.fuzz.wire` runs for as long as one likes."""

from __future__ import annotations

import pytest

from tests.fuzz.wire.run import fuzz

MAX_GROWN_BYTES = 30_000_000


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("service", "num_examples", "wanted"),
    [
        ("scheduler", 120, {"OK", "INVALID_ARGUMENT"}),
        ("simulated", 100, {"OK", "INVALID_ARGUMENT", "STEP_STATUS_OK", "STEP_STATUS_INVALID_PLAN"}),
        ("cpu", 80, {"OK", "INVALID_ARGUMENT", "STEP_STATUS_OK", "STEP_STATUS_INVALID_PLAN"}),
    ],
)
def test_anything_on_the_wire_ends_cleanly(service: str, num_examples: int, wanted: set[str]) -> None:
    """And the next normal request or plan gives what it gave before."""
    report = fuzz(service, num_examples, seed_=7)
    assert report.num_examples == num_examples
    # Else the run proves little.
    assert not wanted - {name for name, count in report.statuses.items() if count >= 5}, report.statuses
    assert report.grown_bytes < MAX_GROWN_BYTES
