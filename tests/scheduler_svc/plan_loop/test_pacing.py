"""When the next plan is due: late in the running step, whatever sizes of steps came before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.plan_loop.pacing import StepPacer

STEP_S, TOKEN_S = 0.025, 0.0001


def seen(*sizes: int, step_s: float = STEP_S, token_s: float = TOKEN_S) -> StepPacer:
    """A pacer that has seen steps of these sizes."""
    pacer = StepPacer()
    for size in sizes:
        pacer.observe(size, step_s + token_s * size)
    return pacer


def test_what_is_not_known_is_planned_at_once() -> None:
    pacer = StepPacer()
    pacer.started(5.0)
    assert pacer.predict(10) == 0.0
    assert pacer.due(10) == 5.0


def test_a_decode_after_a_prompt_takes_as_long_as_decodes_did() -> None:
    pacer = seen(*[20] * 8, 2048)
    assert pacer.predict(20) == pytest.approx(STEP_S + 20 * TOKEN_S)
    assert pacer.predict(2048) == pytest.approx(STEP_S + 2048 * TOKEN_S)
    pacer.started(1.0)
    assert 1.01 < pacer.due(20) < 1.025


def test_prompts_are_remembered_over_any_number_of_decodes() -> None:
    assert seen(2048, *[20] * 1000).predict(2000) > 0.2


def test_one_quick_step_counts_until_some_more_were_seen() -> None:
    pacer = StepPacer()
    for duration in (0.03, 0.01, 0.03, 0.03, 0.03):
        pacer.observe(20, duration)
    assert pacer.predict(20) == 0.01
    pacer.observe(20, 0.03)
    assert pacer.predict(20) == 0.03


def test_the_wait_for_an_earlier_step_is_no_part_of_a_step() -> None:
    """A GPU's executor launches a step while the one before runs: each takes 10 ms, and 20 ms from its launch."""
    pacer = StepPacer()
    pacer.started(1.0)
    for step in range(1, 6):
        pacer.ended(20, 0.010 if step == 1 else 0.020, 1.0 + 0.010 * step)
    assert pacer.predict(20) == pytest.approx(0.010)
    assert 1.050 < pacer.due(20) < 1.055


@given(
    st.lists(st.integers(0, 4096), min_size=1),
    st.integers(0, 4096),
    st.floats(1e-4, 0.1),
    st.floats(0, 1e-3),
)
def test_a_step_is_never_shorter_than_predicted_where_time_grows_evenly(
    sizes: list[int], size: int, step_s: float, token_s: float
) -> None:
    predicted = seen(*sizes, step_s=step_s, token_s=token_s).predict(size)
    assert predicted > 0 or size == 0
    assert predicted <= (step_s + token_s * size) * (1 + 1e-9)
