"""Long work in slices, so that an event loop runs its other callbacks in between.

Work is a generator that yields after each slice and returns its result. A slice handles at most SLICE_ITEMS items,
which takes under 1 ms (docs/decisions/0025). The same generator serves callers that cannot wait: `run_at_once`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")

Work = Generator[None, None, _T]
"""Work that yields after each slice and returns its result."""

SLICE_ITEMS = 16_384
"""Most items, such as token ids, that one slice handles."""


def run_at_once(work: Work[_T]) -> _T:
    """Run all slices one after the other; returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _T = end.value
            return result


async def run_in_slices(work: Work[_T]) -> _T:
    """Run the slices with other callbacks of the event loop in between; returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _T = end.value
            return result
        await asyncio.sleep(0)


def slices_of(values: Any) -> Iterator[Any]:
    """The values, a sequence of any kind, in parts of at most SLICE_ITEMS."""
    for start in range(0, len(values), SLICE_ITEMS):
        yield values[start : start + SLICE_ITEMS]


def to_list(values: Any) -> Work[list[Any]]:
    """Copy a sequence to a list. A short one is one slice, without a pause."""
    if len(values) <= SLICE_ITEMS:
        return list(values)
    copied: list[Any] = []
    for part in slices_of(values):
        copied += part
        yield
    return copied
