"""The simulated source of drafts: as many are right as its acceptance says, whatever the batch."""

from __future__ import annotations

import pytest

from executor_svc.simulated.drafts import AcceptanceSource
from executor_svc.speculation.drafting import Drafting
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.known import VOCAB_SIZE

NUM_REQUESTS = 8


def shares(acceptance: float, num_at_once: int) -> list[float]:
    """By position, of drafts that were made, those accepted."""
    bench = Bench(max_drafts=3, num_blocks=400, num_slots=64, max_num_seqs=64, max_num_batched_tokens=128)
    inner = bench.executor.inner
    inner._drafting = Drafting(inner.slots, AcceptanceSource(VOCAB_SIZE, acceptance))
    for index in range(NUM_REQUESTS):
        bench.add(f"r{index}", 5, 40, seed=index, temperature=float(index % 2))
        if index % num_at_once == num_at_once - 1:
            bench.run()
    assert all(bench.tokens[f"r{index}"] == bench.known(f"r{index}") for index in range(NUM_REQUESTS))
    drafts = bench.lane.counts.drafts
    return [accepted / drafted for accepted, drafted in zip(drafts.accepted, drafts.drafted, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("acceptance", "num_at_once"), [(0.0, 8), (0.6, 1), (0.6, 8), (1.0, 8)])
def test_each_draft_is_right_as_often_as_stated(acceptance: float, num_at_once: int) -> None:
    expected = [acceptance, acceptance**2, acceptance**3]
    assert shares(acceptance, num_at_once) == pytest.approx(expected, abs=0 if acceptance in (0, 1) else 0.12)
