"""The bound in bytes of what sequences share, and what is dropped for it."""

import gc
import random
import tracemalloc

import pytest

from executor_svc.cpu.kernels.suffixes.growth import SuffixKernels
from executor_svc.speculation.shared_automata import SMALLEST_MAX_BYTES
from executor_svc.speculation.suffix import SuffixSource
from executor_svc.speculation.suffix_automaton import SuffixAutomaton
from tests.executor_svc.speculation.draft_model import (
    Driver,
    drafts_after,
    limits,
    num_own_bytes,
    num_shared_bytes,
    produce,
    random_text,
)
from tests.helpers.marks import short_and_long


def driver_of(num_slots=4):
    bounds = limits(num_slots, 512)
    return Driver(SuffixSource(bounds, SuffixKernels(), max_bytes=SMALLEST_MAX_BYTES), bounds)


@pytest.mark.slow
@pytest.mark.parametrize("num_scopes", [1, 3, 400])
def test_the_bound_in_bytes_holds(num_scopes):
    rng = random.Random(num_scopes)
    driver = driver_of()
    source = driver.source
    largest = 0
    for number in range(160):
        scope = 1 + number % num_scopes
        prompt, output = random_text(rng, 20), random_text(rng, 150)
        driver.admit(0, prompt, scope)
        for start in range(0, len(output), 30):
            driver.append(0, output[start : start + 30])
            driver.drafts([0])
            largest = max(largest, num_shared_bytes(source))
        driver.release(0)
        # The newest output is kept.
        assert drafts_after(driver, [*prompt, *output[:70]], scope) == output[70:75]
    assert SMALLEST_MAX_BYTES / 3 < largest <= SMALLEST_MAX_BYTES


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("num_scopes", short_and_long([1, 300], [1]))
def test_shared_bytes_are_those_that_python_allocates(num_scopes):
    rng = random.Random(1)
    driver = driver_of()
    largest = 0
    driver.drafts([0])
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    # Of one scope, 200 sequences reach the bound.
    for number in range(230 if num_scopes == 1 else 500):
        produce(driver, 0, random_text(rng, 20), random_text(rng, 60), 1 + number % num_scopes)
        held = tracemalloc.get_traced_memory()[0] - before
        largest = max(largest, held)
        if held > SMALLEST_MAX_BYTES // 4:
            assert num_shared_bytes(driver.source) == pytest.approx(held, rel=0.1)
    tracemalloc.stop()
    assert SMALLEST_MAX_BYTES / 3 < largest <= SMALLEST_MAX_BYTES


@pytest.mark.slow
def test_the_scope_used_least_recently_is_dropped():
    rng = random.Random(8)
    driver = driver_of()
    texts = {scope: (random_text(rng, 20), random_text(rng, 200)) for scope in (1, 2)}
    for scope, (prompt, output) in texts.items():
        produce(driver, 0, prompt, output, scope)
    for number in range(120):
        produce(driver, 1, random_text(rng, 20), random_text(rng, 200), 100 + number)
        # Scope 1 is in use.
        assert drafts_after(driver, texts[1][0], 1) == texts[1][1][:5]
    prompt, output = texts[2]
    assert drafts_after(driver, prompt, 2) == []


@pytest.mark.slow
def test_the_oldest_sequences_of_a_scope_are_dropped():
    rng = random.Random(9)
    driver = driver_of()
    texts = [(random_text(rng, 20), random_text(rng, 200)) for _ in range(120)]
    for prompt, output in texts:
        produce(driver, 0, prompt, output, 1)
    known = [drafts_after(driver, prompt, 1) == output[:5] for prompt, output in texts]
    assert known == sorted(known)
    assert 20 < sum(known) < 110


@pytest.mark.slow
def test_a_sequence_goes_on_after_its_automaton_was_dropped():
    rng = random.Random(10)
    driver = driver_of()
    phrase = random_text(rng, 40)
    driver.admit(0, phrase[:10], 1)
    driver.admit(1, random_text(rng, 5), 2)
    for number in range(150):
        # One scope fills the memory; the other one has had its turn before it, in each step.
        driver.append(0, phrase[10 + number : 11 + number])
        driver.append(1, random_text(rng, 3))
        driver.drafts([0, 1])
        produce(driver, 2, random_text(rng, 5), random_text(rng, 200), 3 + number % 7)
    assert num_shared_bytes(driver.source) <= SMALLEST_MAX_BYTES
    driver.append(0, [1, 2, 3])
    driver.append(1, [1, 2, 3])
    driver.drafts([0, 1])
    assert drafts_after(driver, [7, 1, 2], 1) == [3]


def test_what_is_dropped_is_not_kept_by_sequences_that_still_run():
    rng = random.Random(13)
    driver = driver_of(150)
    gc.collect()
    others = [thing for thing in gc.get_objects() if type(thing) is SuffixAutomaton]  # kept: no id is used again
    known = set(map(id, others))
    for slot in range(150):
        driver.admit(slot, random_text(rng, 20), 1 + slot)
        driver.append(slot, random_text(rng, 200))
        driver.drafts([slot])
    gc.collect()
    live = [thing for thing in gc.get_objects() if type(thing) is SuffixAutomaton and id(thing) not in known]
    shared = sum(automaton.num_bytes for automaton in live) - num_own_bytes(driver.source)
    assert SMALLEST_MAX_BYTES / 2 < shared <= SMALLEST_MAX_BYTES
    # A sequence whose automaton was dropped goes on in a new one, which others use.
    driver.append(0, [1, 2, 3, 4])
    driver.drafts([0])
    driver.release(149)
    driver.admit(149, [9, 1, 2], 1)
    assert driver.drafts([149]) == [[3, 4]]
