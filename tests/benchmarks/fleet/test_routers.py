"""The routers' policies: what each promises, whatever the load."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fleet.arrivals import Arrivals
from benchmarks.fleet.routers import ROUTERS, Load, Ring, Router, RouterName, fill_up, make_router, read_router
from cadenza_loadtest.requests import Ints, LoadTestError

SCHEDULERS = 8


def router(name: RouterName, num_schedulers: int = SCHEDULERS) -> Router:
    return make_router(name, num_schedulers, 1000, 4, 1_000_000, seed=1)


def load(unfinished: list[int], down: tuple[int, ...] = ()) -> Load:
    up = np.array([place not in down for place in range(len(unfinished))])
    return Load(np.array(unfinished), np.array(unfinished), np.zeros(len(unfinished)), up)


def arrivals(sessions: list[int], groups: list[int] | None = None, shared: int = 0, at_s: float = 0.0) -> Arrivals:
    count = len(sessions)
    group = np.full(count, -1) if groups is None else np.array(groups)
    return Arrivals(
        np.full(count, at_s), np.full(count, 1000), np.full(count, 10), np.array(sessions), np.zeros(count, bool),
        np.full(count, shared), group, np.where(group >= 0, 512, 0),
    )  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_nothing_goes_to_a_scheduler_that_is_down(name: RouterName) -> None:
    chosen = router(name).choose(arrivals(list(range(200)), [0, 1] * 100), load([5] * SCHEDULERS, down=(0, 3, 7)))
    assert set(chosen.tolist()) <= {1, 2, 4, 5, 6}
    assert len(chosen) == 200


@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_seed_chooses_the_same(name: RouterName) -> None:
    def choices() -> list[Ints]:
        made = router(name)
        return [made.choose(arrivals(list(range(base, base + 50))), load([3] * SCHEDULERS)) for base in (0, 20, 40)]

    for one, other in zip(choices(), choices(), strict=True):
        assert (one == other).all()


def test_round_robin_takes_turns_across_slices() -> None:
    made = router("round-robin", 3)
    taken = [*made.choose(arrivals([0] * 4), load([0] * 3)), *made.choose(arrivals([0] * 2), load([9, 0, 0]))]
    assert taken == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_is_filled_up_like_one_by_one() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        loads, count = rng.integers(0, 9, int(rng.integers(1, 9))), int(rng.integers(1, 40))
        expected, now = [], loads.copy()
        for _ in range(count):
            expected.append(int(now.argmin()))
            now[expected[-1]] += 1
        assert fill_up(loads, count).tolist() == expected


def test_two_choices_avoid_the_busiest() -> None:
    chosen = router("power-of-two").choose(arrivals(list(range(400))), load([1000, *[0] * 7]))
    assert (chosen == 0).sum() == 0
    assert np.bincount(chosen)[1:].max() < 2 * 400 / 7


def test_a_session_stays_and_few_move_when_one_is_down() -> None:
    made, sessions = router("session-hash"), list(range(500))
    before = made.choose(arrivals(sessions), load([0] * SCHEDULERS))
    assert (made.choose(arrivals(sessions), load([99, *[0] * 7])) == before).all()
    after = made.choose(arrivals(sessions), load([0] * SCHEDULERS, down=(2,)))
    assert (after[before != 2] == before[before != 2]).all()
    assert len(set(after[before == 2].tolist())) > 3
    assert np.bincount(before, minlength=SCHEDULERS).min() > 25


def test_bounded_loads_stay_within_a_quarter_of_the_mean() -> None:
    """500 requests of one session: the first of the ring, then the next, none over 1.25 times the mean."""
    chosen = router("bounded-hash").choose(arrivals([7] * 500), load([0] * SCHEDULERS))
    assert np.bincount(chosen, minlength=SCHEDULERS).max() <= 1.25 * 500 / SCHEDULERS + 1
    few = router("bounded-hash").choose(arrivals([7] * 2), load([10] * SCHEDULERS))
    assert len(set(few.tolist())) == 1


def test_a_prefix_gathers_until_the_load_factor() -> None:
    made = router("prefix-hash")
    first = made.choose(arrivals([1, 2, 3], [0, 0, 0]), load([10] * SCHEDULERS))
    assert len(set(first.tolist())) == 1
    loads = [10] * SCHEDULERS
    loads[int(first[0])] = 40
    assert made.choose(arrivals([4], [0]), load(loads))[0] != first[0]


def test_cache_aware_goes_where_the_prompt_was() -> None:
    made = router("cache-aware")
    home = int(made.choose(arrivals([5]), load([3, 0, *[3] * 6]))[0])
    assert home == 1
    assert made.choose(arrivals([5], shared=900), load([0, 60, *[0] * 6]))[0] == home
    assert made.choose(arrivals([5], shared=200), load([0, 60, *[0] * 6]))[0] == 0  # 0.2 of the prompt: too little
    assert made.choose(arrivals([5], shared=900), load([0, 99, *[0] * 6]))[0] == 0  # 99 more than the least loaded


def test_llmd_weighs_the_prefix_against_the_queue() -> None:
    made = router("llm-d")
    home = int(made.choose(arrivals([5]), load([3, 0, *[3] * 6]))[0])
    assert home == 1
    assert made.choose(arrivals([5], shared=1000, at_s=1.0), load([0, 60, *[0] * 6]))[0] == home  # 3 against 2
    assert made.choose(arrivals([5], shared=500, at_s=2.0), load([0, 60, *[0] * 6]))[0] != home  # 1.5 against 2


def test_a_ring_is_even() -> None:
    owners = Ring(16).owners[Ring(16).places(np.arange(20_000))]
    counts = np.bincount(owners, minlength=16)
    assert counts.min() > 0.6 * 1250
    assert counts.max() < 1.5 * 1250


def test_an_unknown_router() -> None:
    with pytest.raises(LoadTestError, match="--router luck: must be one of round-robin, least-requests"):
        read_router("luck")
