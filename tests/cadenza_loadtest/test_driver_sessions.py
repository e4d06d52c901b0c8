"""The driver's sessions: turns that follow answers, and how sessions end."""

from __future__ import annotations

import numpy as np
import pytest

from cadenza_loadtest.driving.driver import drive
from cadenza_loadtest.driving.pacing import units
from cadenza_loadtest.requests import RequestShape
from tests.helpers.loadtest.driver_target import FakePrompts, FakeTarget, shape

pytestmark = pytest.mark.slow


def conversation(first: int, turns: int, session: int, think_s: float = 0.0, **fields) -> list[RequestShape]:
    return [
        shape(first + turn, session=session, turn=turn, think_s=think_s if turn else 0.0, **fields)
        for turn in range(turns)
    ]


async def test_a_turn_follows_the_answer_and_begins_with_all_before() -> None:
    target = FakeTarget(takes_s=0.005)
    talk = conversation(0, 3, session=7, think_s=0.02)
    columns = await drive([(0.0, each) for each in talk], target, FakePrompts())
    assert columns.ok.all()
    assert columns.turn.tolist() == [0, 1, 2]
    assert columns.due_s[1:] == pytest.approx(columns.last_s[:-1] + 0.02, abs=1e-9)
    first = [0, 0]
    second = [*first, 1000, 1000, 1000, 1, 1]
    assert target.prompts == {0: first, 1: second, 2: [*second, 1001, 1001, 1001, 2, 2]}
    assert columns.num_prompt_tokens.tolist() == [2, 7, 12]


async def test_texts_begin_with_all_before_too() -> None:
    target = FakeTarget()
    talk = conversation(0, 2, session=0)
    await drive([(0.0, each) for each in talk], target, FakePrompts(), text_prompts=True)
    assert target.prompts == {0: "[0]", 1: "[0]<0>[1]"}
    target = FakeTarget()
    await drive([(0.0, shape(0, prompt_text="hello"))], target, FakePrompts())
    assert target.prompts == {0: "[hello]"}, "a text from a file is sent as a text"


async def test_an_answer_that_is_not_reported_still_counts_in_the_history() -> None:
    target = FakeTarget(reports_output=False)
    talk = [shape(0, session=0, n=2, num_output_tokens=5), shape(1, session=0, turn=1)]
    await drive([(0.0, each) for each in talk], target, FakePrompts())
    assert len(target.prompts[1]) == 2 + 5 + 2


async def test_a_turn_that_fails_ends_its_session_only() -> None:
    target = FakeTarget(errors={1: "HTTP_503"})
    first, second = conversation(0, 4, session=0), conversation(4, 2, session=1)
    columns = await drive([(0.0, each) for each in (*first, *second)], target, FakePrompts())
    assert columns.error.tolist() == ["", "HTTP_503", "SKIPPED", "SKIPPED", "", ""]
    assert sorted(target.started) == [0, 1, 4, 5]
    assert np.isnan(columns.sent_s[2:4]).all()
    assert np.isfinite(columns.due_s).all()


async def test_sessions_of_a_closed_loop_are_users() -> None:
    target = FakeTarget(takes_s=0.002)
    talks = [each for number in range(5) for each in conversation(3 * number, 3, session=number, think_s=0.01)]
    columns = await drive([(0.0, each) for each in talks], target, FakePrompts(), concurrency=2)
    assert target.most_running <= 2
    assert columns.ok.all()
    assert columns.due_s[[1, 2]] == pytest.approx(columns.last_s[[0, 1]] + 0.01, abs=1e-9)


async def test_turns_past_the_duration_are_left_out() -> None:
    talk = conversation(0, 3, session=0, think_s=30.0)
    columns = await drive([(0.0, each) for each in talk], FakeTarget(), FakePrompts(), duration_s=1.0)
    assert columns.turn.tolist() == [0]


def test_turns_of_a_session_are_one_unit() -> None:
    shapes = [shape(0), *conversation(1, 2, session=0), *conversation(3, 2, session=1), shape(5), shape(6)]
    found = list(units((float(each.index), each) for each in shapes))
    assert [[each.index for each in unit.shapes] for unit in found] == [[0], [1, 2], [3, 4], [5], [6]]
    assert [unit.due_s for unit in found] == [0, 1, 3, 5, 6]
