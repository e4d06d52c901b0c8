"""Long work in slices: what one slice handles, and that other callbacks run in between."""

from __future__ import annotations

import asyncio

import pytest

from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once, run_in_slices, slices_of, to_list


@pytest.mark.parametrize("count", [0, 1, SLICE_ITEMS, SLICE_ITEMS + 1, 3 * SLICE_ITEMS])
def test_slices_are_short_and_hold_all(count: int) -> None:
    parts = list(slices_of(range(count)))
    assert all(0 < len(part) <= SLICE_ITEMS for part in parts)
    assert [value for part in parts for value in part] == list(range(count))
    assert run_at_once(to_list(range(count))) == list(range(count))


def test_a_short_list_is_copied_without_a_pause_and_a_long_one_with_one_for_each_slice() -> None:
    assert len(list(to_list(range(SLICE_ITEMS)))) == 0
    assert len(list(to_list(range(3 * SLICE_ITEMS + 1)))) == 4


async def test_other_callbacks_run_between_the_slices() -> None:
    seen: list[object] = []

    def work() -> Work[str]:
        for index in range(3):
            seen.append(index)
            asyncio.get_running_loop().call_soon(seen.append, f"after {index}")
            yield
        return "done"

    assert await run_in_slices(work()) == "done"
    assert seen == [0, "after 0", 1, "after 1", 2, "after 2"]


async def test_an_error_in_a_slice_is_raised() -> None:
    def work() -> Work[None]:
        yield
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await run_in_slices(work())
    with pytest.raises(ValueError, match="wrong"):
        run_at_once(work())
