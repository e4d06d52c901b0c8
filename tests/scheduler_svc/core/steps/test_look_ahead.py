"""Prefix cache lookups before a plan: in slices, and without any effect on what is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.memory import prefix_lookups
from scheduler_svc.core.policies.policies import Policies
from tests.helpers.core.core_bench import Bench

SLICE_BLOCKS = 1024
NUM_TOKENS = 4 * 4 * SLICE_BLOCKS
LIMITS: dict[str, Any] = {"num_blocks": 3 * NUM_TOKENS // 4, "max_num_batched_tokens": NUM_TOKENS}
"""A cached prompt takes five slices, in blocks of four tokens."""


@pytest.fixture
def num_packed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of blocks looked up since the last call."""
    pack, counts = prefix_lookups.pack_blocks, [0]

    def counted(token_ids: Any, size: int) -> list[bytes]:
        counts[0] += len(token_ids) // size
        return pack(token_ids, size)

    def take() -> int:
        found, counts[0] = counts[0], 0
        return found

    monkeypatch.setattr(prefix_lookups, "pack_blocks", counted)
    return take


def warm_bench() -> Bench:
    """A core whose cache has the prompt of the next request."""
    bench = Bench(Policies(prefix_caching=True), max_model_len=2 * NUM_TOKENS, **LIMITS)
    bench.add("first", NUM_TOKENS + 1, max_tokens=1)
    bench.run()
    return bench


def test_a_long_lookup_is_done_in_slices_before_the_plan(num_packed: Callable[[], int]) -> None:
    bench = warm_bench()
    bench.add("second", NUM_TOKENS + 1, max_tokens=1)
    num_packed()
    slices = [num_packed() for _ in bench.core.look_ahead(0, 0.0)]
    assert slices == [SLICE_BLOCKS] * 4
    assert bench.plan() is not None
    assert num_packed() == 0
    assert bench.lane.inflight[-1].chunks[0].num_tokens == 1, "the rest is cached"
    bench.run()


def test_nothing_is_looked_up_again_and_short_requests_make_no_pause(num_packed: Callable[[], int]) -> None:
    bench = warm_bench()
    assert not list(bench.core.look_ahead(0, 0.0))
    bench.add("second", NUM_TOKENS + 1, max_tokens=1)
    assert len(list(bench.core.look_ahead(0, 0.0))) == 4
    assert not list(bench.core.look_ahead(0, 0.0))
    for index in range(3):
        bench.add(f"short {index}", 9)
    num_packed()
    assert not list(bench.core.look_ahead(0, 0.0))
    assert num_packed() == 0


def test_a_request_that_ends_in_a_pause_is_not_looked_up_further(num_packed: Callable[[], int]) -> None:
    bench = warm_bench()
    spec = bench.add("second", NUM_TOKENS + 1)
    work = bench.core.look_ahead(0, 0.0)
    next(work)
    bench.take(bench.core.abort(spec.key, bench.details["first"]))
    num_packed()
    assert not list(work)
    assert num_packed() == 0


def test_plans_are_the_same_without_it() -> None:
    def plans(*, looks_ahead: bool) -> list[StepPlan]:
        bench, found = warm_bench(), []
        for index in range(3):
            bench.add(f"r{index}", NUM_TOKENS + 1 - 100 * index, max_tokens=2)
        for _ in range(4):
            for _ in bench.core.look_ahead(0, 0.0) if looks_ahead else ():
                pass
            if (plan := bench.plan()) is not None:
                found.append(plan)
                bench.apply()
        return found

    assert plans(looks_ahead=True) == plans(looks_ahead=False)
