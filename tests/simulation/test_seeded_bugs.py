"""The histories can fail: each of these bugs is found within a few hundred of them."""

from __future__ import annotations

import pytest

from tests.simulation.history import HistoryError, run_history
from tests.simulation.seeded_bugs import SEEDED_BUGS, SeededBug, seeded

_MOST_HISTORIES = 500


@pytest.mark.slow
@pytest.mark.parametrize("bug", SEEDED_BUGS, ids=lambda bug: bug.name)
def test_seeded_bug_is_found(bug: SeededBug) -> None:
    with seeded(bug), pytest.raises(HistoryError) as found:
        for seed in range(_MOST_HISTORIES):
            run_history(seed)
    # The same history is fine without it.
    run_history(found.value.seed)
