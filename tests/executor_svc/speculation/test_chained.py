"""Two sources in a row; shares of what waits to be indexed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cadenza_common.plan.plan import StepPlan
from executor_svc.cpu.kernels.suffixes.growth import SuffixKernels
from executor_svc.speculation.chained import ChainedSource
from executor_svc.speculation.drafts import Drafts, tokens_to_index
from executor_svc.speculation.ngram import NgramSource
from executor_svc.speculation.suffix import SuffixSource
from tests.executor_svc.speculation.draft_model import Driver, limits


class Fixed:
    """A source with given drafts for each slot."""

    def __init__(self, drafts):
        self._drafts = drafts
        self.calls = []

    def looks(self, slots, rows):
        return any(self._drafts[slot] for slot in rows.tolist())

    def propose(self, slots, rows, most):
        parts = [self._drafts[slot][:limit] for slot, limit in zip(rows.tolist(), most.tolist(), strict=True)]
        counts = np.array([len(part) for part in parts], np.int64)
        return Drafts(counts, np.array([token for part in parts for token in part], np.int64))

    def follow(self, plan):
        self.calls.append(("plan", plan.step_id))

    def admitted(self, slot, scope):
        self.calls.append(("admitted", slot, scope))

    def released(self, slots):
        self.calls.append(("released", *slots.tolist()))

    def committed(self, slots, scheduled, starts):
        self.calls.append(("committed", *starts.tolist()))

    def clear(self):
        self.calls.append(("clear",))


PARTS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=5, max_size=5)


@given(PARTS, PARTS, st.lists(st.integers(0, 4), min_size=5, max_size=5), st.sets(st.integers(0, 4)))
def test_the_second_source_drafts_where_the_first_has_none(first, second, most, rows):
    rows = sorted(rows)
    driver = Driver(ChainedSource(Fixed(first), Fixed(second)), limits(5))
    drafts = driver.drafts(rows, [most[slot] for slot in rows])
    assert drafts == [first[slot][: most[slot]] or second[slot][: most[slot]] for slot in rows]


def test_both_sources_follow_the_slots():
    first, second = Fixed([]), Fixed([])
    chained = ChainedSource(first, second)
    chained.follow(StepPlan(step_id=4, epoch=1))
    chained.admitted(3, 9)
    chained.released(np.array([3, 4]))
    chained.committed(None, None, np.array([7, 8]))
    chained.clear()
    assert (
        first.calls
        == second.calls
        == [("plan", 4), ("admitted", 3, 9), ("released", 3, 4), ("committed", 7, 8), ("clear",)]
    )


def test_n_grams_after_suffixes():
    bounds = limits()
    driver = Driver(
        ChainedSource(SuffixSource(bounds, SuffixKernels(), min_match=3), NgramSource(bounds, min_match=2)), bounds
    )
    driver.admit(0, [1, 2, 3, 4, 1, 2, 3])
    driver.admit(1, [1, 2, 3, 4, 0, 2, 3])
    driver.admit(2, [1, 2, 3, 4, 0, 0, 3])
    assert driver.drafts([0, 1, 2], 2) == [[4, 1], [4, 0], []]


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(0, 9), st.integers(0, 150))
def test_shares_of_what_is_indexed(waiting, always, budget):
    taken = tokens_to_index(np.array(waiting, np.int64), always, budget).tolist()
    sure = [min(number, always) for number in waiting]
    assert all(low <= number <= high for low, number, high in zip(sure, taken, waiting, strict=True))
    beyond = sum(taken) - sum(sure)
    assert beyond == min(budget, sum(waiting) - sum(sure))
    # Those with the fewest waiting first.
    for number, part, low in zip(waiting, taken, sure, strict=True):
        if part > low:
            assert all(n <= t for n, t in zip(waiting, taken, strict=True) if n < number)
