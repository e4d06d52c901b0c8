"""Garbage collections of a service leave out what has survived, so that none holds the event loop for long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from scheduler_svc.front import process_memory
from scheduler_svc.front.process_memory import (
    LONG_PROMPT_TOKENS,
    leave_out_long_prompt,
    release_free_memory,
    shorten_collections,
)


@pytest.fixture
def _short_collections() -> Iterator[None]:
    thresholds = gc.get_threshold()
    shorten_collections()
    try:
        yield
    finally:
        gc.callbacks.remove(process_memory._leave_out_survivors)
        gc.set_threshold(*thresholds)
        process_memory._take_in_survivors()
        gc.freeze()  # as for the whole suite (tests/conftest.py)


def is_left_out(kept: object) -> bool:
    return all(each is not kept for each in gc.get_objects())


@pytest.mark.usefixtures("_short_collections")
def test_survivors_are_left_out_of_later_collections() -> None:
    kept = [object()]
    assert not is_left_out(kept)
    gc.collect(0)
    assert not is_left_out(kept), "it may have been in use for a moment only"
    gc.collect(1)
    assert is_left_out(kept)


@pytest.mark.usefixtures("_short_collections")
def test_long_prompts_are_left_out_at_once() -> None:
    kept = [object()]
    leave_out_long_prompt(LONG_PROMPT_TOKENS - 1)
    assert not is_left_out(kept)
    leave_out_long_prompt(LONG_PROMPT_TOKENS)
    assert is_left_out(kept)


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.node = self


@pytest.mark.slow
@pytest.mark.usefixtures("_short_collections")
def test_cycles_among_survivors_are_freed_by_an_idle_process() -> None:
    kept = Node()
    for _ in range(process_memory._LEFT_OUT_ENOUGH):
        gc.collect(1)
    freed = weakref.ref(kept)
    del kept
    gc.collect()
    assert freed() is not None, "it was left out"
    release_free_memory()
    assert freed() is None


@pytest.mark.slow
@pytest.mark.usefixtures("_short_collections")
def test_cycles_among_survivors_are_freed_at_last() -> None:
    kept = Node()
    gc.collect(1)
    freed = weakref.ref(kept)
    del kept
    for _ in range(process_memory._LEFT_OUT_AT_MOST):
        gc.collect(1)
    assert freed() is not None
    gc.collect()
    assert freed() is None


def test_nothing_is_left_out_in_a_process_that_is_no_service() -> None:
    kept = [object()]
    leave_out_long_prompt(LONG_PROMPT_TOKENS)
    gc.collect(1)
    assert not is_left_out(kept)
