"""150 histories in `make check`, 5,850 more in `make test-long`: every promise holds in each, whatever happens."""

from __future__ import annotations

import re

import pytest

from scheduler_svc.core.types import FinishDetail
from tests.simulation.bugs.seeded_bugs import NUM_SEARCHED, SEEDED_BUGS, SeededBug, seeded
from tests.simulation.history import HistoryError, run_history
from tests.simulation.many import run_chunk, summary, total
from tests.simulation.scenario import ADAPTER_FAULT_KINDS, FAULT_KINDS, LANE_FAULT_KINDS, RECORDED_EVERY

NUM_CHECKED = 150
_RARE = 254
"""A history with an end that none of those has: a request that another model cannot serve."""
NUM_TESTED = 6_000
_TESTED_CHUNK = 585
_ENDS = [*sorted(FinishDetail.__members__.keys() - {"GRAMMAR"}), "ModelChangedError", "PreconditionError"]
"""How samples end, and requests that a changed executor cannot serve; simulated executors have no grammars."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_promise_holds_and_everything_happens() -> None:
    """A failure names its seed, and the command that repeats it."""
    reports = run_chunk([*range(NUM_CHECKED), _RARE])
    counts = total(reports)
    print(summary(reports))
    kinds = FAULT_KINDS + LANE_FAULT_KINDS + ADAPTER_FAULT_KINDS
    never = [kind for kind in kinds if not counts[f"fault: {kind}"]]
    assert not never, f"these faults do not happen: {never}"
    missing = [end for end in _ENDS if not counts[f"end: {end}"]]
    assert not missing, f"nothing ends like this: {missing}"
    assert counts["replayed"] == len(range(0, NUM_CHECKED, RECORDED_EVERY))
    assert counts["health checks of hanging steps"] > 0
    for name in ("accepted drafts", "refused drafts", "steps with drafts", "steps of drafting executors without any"):
        assert counts[name] > 90, name
    for name in ("drained", "drained executors", "removed executors", "lanes left", "plans with room for the head"):
        assert counts[name] > 0, name
    for name in ("loads", "unloads", "plans with several adapters"):
        assert counts[name] > 30, name
    for name in ("failed loads", "loads by the operator", "refused loads", "turns", "groups that passed a turn"):
        assert counts[name] > 0, name


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(NUM_CHECKED, NUM_TESTED, _TESTED_CHUNK))
def test_every_promise_holds_in_many_more(first: int) -> None:
    run_chunk(range(first, first + _TESTED_CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 20, 36])
def test_a_seed_repeats_its_history(seed: int) -> None:
    """Event by event, whatever ran before it in this process; 20 runs the service's own executor, 36 is recorded."""
    trace = run_history(seed, trace=True).trace
    run_history(seed + 1)
    assert run_history(seed, trace=True).trace == trace
    assert len(trace) > 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [142, 569, 2788, 2999, 3120, 4362, 4796, 5500, 5958, 7393, 20656, 40891, 72689, 74927, 83435, 84839]
)
def test_what_once_went_wrong_in_few_histories(seed: int) -> None:
    """Requests of adapters outlived the last executor with any; what outgrew all pools waited for ever in a batch; the
    rest of a group waited for a draining executor; an operator's load whose adapter gave its place away had no answer;
    what fitted none of several changed executors, or none that may load its adapter, ended without the reason,
    or went on with tokens of other numerics; a draining executor moved a search away that only it could hold as far,
    and took it back without end; it took the rest of a group in the plan that moved the others; an executor that idled
    did not learn that another had left an adapter which kept the place of the one that a request or an operator waited
    for; what was placed anew before its first token came went on with tokens of other numerics; what only a draining
    executor had the adapter of stayed there when another one had loaded it; two executors had each the adapter of what
    only the other one could hold."""
    run_history(seed)


@pytest.mark.parametrize("seed", [44846, 46001, 53260, 53673, 53967, 70432, 70916, 75606])
def test_what_the_simulation_once_got_wrong(seed: int) -> None:
    """It ended while loads or their answers were under way; it waited for a load whose name had been taken in the same
    turn; it gave an executor the tokens of other numerics than it said, when limits and numerics changed at once;
    it counted a turn on through a drain, and as passed what came while another had the turn; it did not wait as long as
    requests wait for adapters."""
    run_history(seed)


@pytest.mark.sampled(24)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", SEEDED_BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_found_and_the_failure_says_how_to_repeat_it(bug: SeededBug) -> None:
    with seeded(bug):
        with pytest.raises(HistoryError, match=re.escape("python -m tests.simulation --seed")) as found:
            run_chunk([bug.found_in, *range(NUM_SEARCHED)])
        with pytest.raises(HistoryError) as again:
            run_history(found.value.seed, trace=True)
    assert str(again.value) == str(found.value)
    assert len(again.value.trace) > 3
    run_history(found.value.seed)
