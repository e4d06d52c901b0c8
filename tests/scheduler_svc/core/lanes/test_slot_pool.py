"""Slots are free again in the order of the plans that release them."""

from __future__ import annotations

import pytest

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.lanes.slot_pool import SlotPool


def test_a_slot_is_free_after_the_result_before_its_release() -> None:
    pool = SlotPool(2)
    first, second = pool.take(), pool.take()
    pool.release(first)
    assert pool.take_released(5) == [first]
    pool.release(second)
    assert pool.take_released(8) == [second]
    pool.on_result(3)
    assert pool.num_free == 0
    pool.on_result(4)
    assert pool.num_free == 1, "the plan of step 8 may still run with the second"
    pool.check_integrity([])
    pool.on_result(7)
    assert pool.num_free == 2


def test_a_slot_that_is_nowhere_or_twice_is_found() -> None:
    pool = SlotPool(3)
    held = pool.take()
    pool.check_integrity([held])
    with pytest.raises(InvariantError, match="do not add up"):
        pool.check_integrity([])
    with pytest.raises(InvariantError, match="do not add up"):
        pool.check_integrity([held, held])
