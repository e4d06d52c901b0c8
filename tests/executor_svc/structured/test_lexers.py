"""A grammar of many sequences has several lexers, each with a thread of its own."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource, table_source
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.mask_threads import MaskThreads
from executor_svc.structured.matcher import GrammarState
from tests.helpers.paths import ROOT

SPEC = GrammarSpec("regex", "([a-h]{1,3}[0-9]+ )+")
MANY = 12


@pytest.fixture(scope="module")
def source() -> TableSource:
    found = table_source(str(ROOT / "models" / "cadenza-demo"), 2048, [1])
    assert found is not None
    return found


class Grown(Compiler):
    """Says when a grammar has got another lexer."""

    def __init__(self, source: TableSource, num_lexers: int) -> None:
        super().__init__(source, num_lexers=num_lexers)
        self.grown = threading.Semaphore(0)

    def _add_lexer(self, spec: GrammarSpec) -> None:
        super()._add_lexer(spec)
        self.grown.release()

    def wait_grown(self) -> None:
        assert self.grown.acquire(timeout=20)


def begun(compiler: Compiler, count: int) -> list[GrammarState]:
    states = [GrammarState(SPEC, compiler, 0) for _ in range(count)]
    for state in states:
        state.begin(())
    return states


def step(states: list[GrammarState], rng: random.Random) -> None:
    """Each takes one of its allowed tokens."""
    for state in states:
        allowed = np.unpackbits(state.bits[0].view(np.uint8), bitorder="little").nonzero()[0]
        state.take([int(rng.choice([token for token in allowed.tolist() if token != 1]))])


def test_sequences_spread_and_their_masks_stay_the_same(source: TableSource) -> None:
    compiler, alone = Grown(source, 3), Compiler(source)
    several, single = begun(compiler, MANY), begun(alone, MANY)
    compiler.wait_grown()
    for number in range(8):
        step(several, random.Random(number))
        step(single, random.Random(number))
        for one, other in zip(several, single, strict=True):
            assert one.tokens == other.tokens
            assert (one.bits == other.bits).all()
            assert (one.num_masks, one.error, one.forced) == (1, "", other.forced)
    assert Counter(state.lexer for state in several) == {0: MANY // 2, 1: MANY // 2}
    assert {state.lexer for state in single} == {0}
    # Who comes next has the lexer with fewer sequences; who goes leaves it.
    del several[:4]
    light = min((0, 1), key=[state.lexer for state in several].count)
    assert begun(compiler, 1)[0].lexer == light


def test_a_third_lexer_comes_if_two_have_many(source: TableSource) -> None:
    compiler = Grown(source, 3)
    states = begun(compiler, 2 * MANY)
    compiler.wait_grown()
    step(states, random.Random(0))
    assert Counter(state.lexer for state in states) == {0: MANY, 1: MANY}
    compiler.wait_grown()
    step(states, random.Random(1))
    assert Counter(state.lexer for state in states) == {0: MANY * 2 // 3, 1: MANY * 2 // 3, 2: MANY * 2 // 3}
    assert not compiler.grown.acquire(blocking=False)


def test_a_long_output_and_a_failed_lexer_stay_where_they_are(source: TableSource, monkeypatch) -> None:
    compiler = Grown(source, 2)
    long = GrammarState(SPEC, compiler, 0)
    long.begin(source.table().tokenize_str("a1 " * 400))
    assert len(long.tokens) > 512
    states = [long, *begun(compiler, MANY - 1)]
    compiler.wait_grown()
    step(states, random.Random(2))
    assert long.lexer == 0
    assert {state.lexer for state in states} == {0, 1}
    moved = next(state for state in states if state.lexer == 1)
    moved.must_walk = True
    moved.walk_alone()
    assert moved.lexer == 0
    assert moved._is_alone
    assert not compiler.has(SPEC), "the next sequence compiles it anew"
    step(states, random.Random(3))
    assert not [state.error for state in states if state.error]


def test_a_thread_for_each_lexer(source: TableSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds up the sequences of one does not hold up those of the other."""
    compiler = Grown(source, 2)
    states = begun(compiler, MANY)
    compiler.wait_grown()
    step(states, random.Random(0))
    first, other = ([state for state in states if state.lexer == number] for number in (0, 1))
    threads, may_go_on = MaskThreads(MANY, 2), threading.Event()
    workers: dict[int, int] = {}

    def take(state: GrammarState, _: Sequence[int]) -> None:
        workers[id(state)] = threading.get_ident()
        assert state is not first[0] or may_go_on.wait(20)

    monkeypatch.setattr(GrammarState, "take", take)
    held = threads.take_each([(first[0], [1])])
    for work in threads.take_each([(state, [1]) for state in other]):
        work.result(20)
    assert not held[0].done()
    may_go_on.set()
    held[0].result(20)
    assert held[0].done()
    assert len({workers[id(state)] for state in other}) == 1
    assert workers[id(first[0])] != workers[id(other[0])]


def test_one_future_for_a_batch(source: TableSource) -> None:
    """Each part is done for itself, and waited for by it."""
    states = begun(Compiler(source), 3)
    allowed = [np.unpackbits(state.bits[0].view(np.uint8), bitorder="little").nonzero()[0] for state in states]
    works = MaskThreads(MANY).take_each([(state, [int(ids[0])]) for state, ids in zip(states, allowed, strict=True)])
    for work in works:
        work.result(20)
    assert [work.done() for work in works] == [True] * 3
    assert [len(state.tokens) for state in states] == [1] * 3
    assert [state.num_masks for state in states] == [1] * 3
