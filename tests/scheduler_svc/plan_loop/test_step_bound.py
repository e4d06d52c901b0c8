"""Upper estimates of step durations: never too short for a step that only grew, and not misled by one slow step."""

from __future__ import annotations

import random

from scheduler_svc.plan_loop.step_bound import UNKNOWN_S, StepBound


def linear(num_tokens: int, num_context_tokens: int) -> float:
    """The duration of a step on a device with a cost per step, per token and per context token."""
    return 0.002 + 1e-4 * num_tokens + 2e-7 * num_context_tokens


def test_nothing_is_known_at_first() -> None:
    assert StepBound().predict(1, 1) == UNKNOWN_S
    assert StepBound().predict(4096, 10**7) == UNKNOWN_S


def test_steps_that_have_run_are_predicted_as_they_ran() -> None:
    bound = StepBound()
    for _ in range(3):
        bound.observe(8, 1000, 0.25)
    assert bound.predict(8, 1000) == 0.25
    assert bound.predict(16, 1000) == 0.5
    assert bound.predict(8, 4000) == 1.0
    assert bound.predict(1, 1) == 0.25, "a smaller step is not known to be faster"


def test_the_estimate_is_an_upper_one_for_costs_that_grow_with_the_work() -> None:
    draw = random.Random(7)
    for _ in range(200):
        bound = StepBound()
        for _ in range(draw.randrange(2, 40)):
            size = draw.randrange(0, 600), draw.randrange(0, 300_000)
            bound.observe(*size, linear(max(1, size[0]), max(1, size[1])))
        size = draw.randrange(1, 4096), draw.randrange(1, 10**7)
        assert bound.predict(*size) >= linear(*size)


def test_it_never_falls_when_a_count_grows() -> None:
    draw = random.Random(3)
    for _ in range(100):
        bound = StepBound()
        for _ in range(draw.randrange(1, 30)):
            bound.observe(draw.randrange(0, 600), draw.randrange(0, 300_000), draw.expovariate(1.0))
        for _ in range(30):
            tokens, context = draw.randrange(0, 1000), draw.randrange(0, 400_000)
            more = tokens + draw.randrange(0, 50), context + draw.randrange(0, 5000)
            assert bound.predict(*more) >= bound.predict(tokens, context)


def test_one_slow_step_does_not_count() -> None:
    bound = StepBound()
    for seconds in (0.01, 0.01, 60.0, 0.01):
        bound.observe(4, 200, seconds)
    assert bound.predict(4, 200) == 0.01
    bound.observe(64, 10_000, 50.0)
    assert bound.predict(64, 10_000) < 1.0, "a single step of its size may be the slow one"


def test_slow_steps_that_come_again_count() -> None:
    """Larger than their tokens explain: block moves, or logprobs of a prompt."""
    bound = StepBound()
    for _ in range(8):
        bound.observe(4, 200, 0.01)
    for _ in range(2):
        bound.observe(16, 300, 5.0)
    assert bound.predict(16, 300) == 5.0
    assert bound.predict(4, 200) == 0.01


def test_old_steps_are_forgotten() -> None:
    bound = StepBound()
    for seconds in [3.0] * 8 + [0.5] * 7:
        bound.observe(4, 200, seconds)
    assert bound.predict(4, 200) == 0.5
