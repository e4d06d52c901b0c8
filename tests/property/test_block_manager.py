"""The block manager under a hypothesis state machine, against a model that knows what every block holds."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.errors import InvariantError
from tests.helpers.core.block_books import STOP
from tests.helpers.core.block_world import GROUPS, PROMPTS, TOKENS, World
from tests.simulation.bugs.seeded_bugs import SeededBug, seeded
from tests.simulation.bugs.state_bugs import STATE_BUGS
from tests.simulation.bugs.window_bugs import WINDOW_BUGS

START = {
    "block_size": [2, 3, 1],
    "num_blocks": [18, 24, 12, 8],
    "num_host_blocks": [8, 16, 4, 0],
    "caching": [True, True, True, False],
    "rates": [None, (1000, 1), (10, 15), (1, 1000)],
    "groups": GROUPS,
    "state_pages": [0, 0, 1, 3],
}
ARRIVE = {
    "prompt": PROMPTS,
    "num_tokens": [9, 6, 7, 4, 3, 1],
    "scope": [("", b"", b""), ("", b"", b""), ("", b"", b""), ("t", b"", b""), ("", b"s", b""), ("", b"", b"a" * 32)],
    "option": ["", "", "", "again", "again", "opted out", "logprobs"],
    "num_reserved": [0, 0, 0, 3],
    "makes_way": ["", "", "", "swap out", "end"],
}
CHANGE = {
    "op": [
        "fork",
        "fork",
        "swap in",
        "swap in",
        "swap out",
        "admit",
        "admit beside",
        "preempt",
        "spoil",
        "end swapped",
    ],
    "pick": list(range(20)),
    "num_rows": [1, 2, 3],
    "token_id": TOKENS,
}
WANTED, SAMPLED, CONFIRMED = [12, 12, 4, 2, 1, 0], [*TOKENS, *TOKENS, STOP], [True, True, False]


def one_of_each(choices: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})


def some_of(values: list[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=4)


class BlockMachine(RuleBasedStateMachine):
    @initialize(start=one_of_each(START))
    def start(self, start: dict[str, Any]) -> None:
        self.world = World(**start)

    @rule(arrival=one_of_each(ARRIVE))
    def arrive(self, arrival: dict[str, Any]) -> None:
        self.world.arrive(**arrival)

    @rule(change=one_of_each(CHANGE))
    def change(self, change: dict[str, Any]) -> None:
        self.world.change(**change)

    @precondition(lambda self: self.world.running)
    @rule(wanted=some_of(WANTED), sampled=some_of(SAMPLED), confirmed=some_of(CONFIRMED))
    def step(self, wanted: list[int], sampled: list[int], confirmed: list[bool]) -> None:
        self.world.step(wanted, sampled, confirmed)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("seed", range(60))
def test_random_histories(seed: int) -> None:
    """Long ones, in which every kind of thing happens often: hypothesis prefers simple ones."""
    run_history(seed, START)


def run_histories(count: int, start: dict[str, list[Any]]) -> None:
    for seed in range(count):
        run_history(seed, start)


def run_history(seed: int, start: dict[str, list[Any]]) -> None:
    rng = random.Random(seed)
    world = World(**{name: rng.choice(values) for name, values in start.items()})
    for _ in range(300):
        match rng.choice("acccss"):
            case "a":
                world.arrive(**{name: rng.choice(values) for name, values in ARRIVE.items()})
            case "c":
                world.change(**{name: rng.choice(values) for name, values in CHANGE.items()})
            case _:
                world.step(rng.choices(WANTED, k=4), rng.choices(SAMPLED, k=4), rng.choices(CONFIRMED, k=4))
        world.check()
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize("bug", WINDOW_BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_windows_is_found(bug: SeededBug) -> None:
    start = {**START, "groups": [each for each in GROUPS if len(each) > 1], "caching": [True], "state_pages": [0]}
    with seeded(bug), pytest.raises((AssertionError, InvariantError, KeyError)):
        run_histories(60, start)


@pytest.mark.slow
@pytest.mark.parametrize("bug", STATE_BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_states_is_found(bug: SeededBug) -> None:
    start = {**START, "caching": [True], "state_pages": [1, 3]}
    with seeded(bug), pytest.raises((AssertionError, InvariantError, KeyError, StopIteration)):
        run_histories(60, start)
