"""Who waits for a grammar that is being compiled, what is kept of it, and which thread works on what."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import pytest

from cadenza_common.grammar import compiling
from cadenza_common.grammar.compiling import GrammarError
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource, table_source
from executor_svc.structured.compile_turns import NUM_THREADS
from executor_svc.structured.compiler import Compiled, Compiler, compiled_bytes
from executor_svc.structured.mask_threads import MaskThreads
from executor_svc.structured.matcher import GrammarState
from tests.helpers.paths import ROOT

A, B, BAD = GrammarSpec("regex", "a+"), GrammarSpec("regex", "b+"), GrammarSpec("regex", "(")


@pytest.fixture(scope="module")
def source() -> TableSource:
    found = table_source(str(ROOT / "models" / "cadenza-demo"), 2048, [1])
    assert found is not None
    return found


class Slow(Compiler):
    """Compiles A once it may."""

    def __init__(self, source: TableSource) -> None:
        super().__init__(source)
        self.may_go_on = threading.Event()
        self.num_compiled = 0

    def fresh(self, spec: GrammarSpec) -> Compiled:
        if spec == A:
            assert self.may_go_on.wait(30)
        self.num_compiled += 1
        return super().fresh(spec)


def test_only_those_with_the_same_grammar_wait(source: TableSource) -> None:
    compiler = Slow(source)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(compiler.request(A).result) for _ in range(3)]
        assert compiler.request(B).result().matcher().consume_tokens([])
        assert not any(each.done() for each in waiting)
        compiler.may_go_on.set()
        assert len({id(each.result()) for each in waiting}) == 1
    assert compiler.num_compiled == 2
    assert compiler.has(A)


class Held(Compiler):
    """Compiles each grammar once it may, and notes their order."""

    def __init__(self, source: TableSource) -> None:
        super().__init__(source)
        self.may_go_on = defaultdict[str, threading.Event](threading.Event)
        self.changed = threading.Condition()
        self.begun: list[str] = []
        self.niceness: list[int] = []

    def fresh(self, spec: GrammarSpec) -> Compiled:
        with self.changed:
            self.begun.append(spec.text)
            self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            self.changed.notify_all()
        assert self.may_go_on[spec.text].wait(20)
        return super().fresh(spec)

    def ask(self, name: str, asked_by: int) -> Future[Compiled]:
        return self.request(GrammarSpec("regex", name), asked_by)

    def after(self, *ended: str, num_begun: int) -> list[str]:
        """The grammars that have begun, once so many have, after these have ended."""
        for name in ended:
            self.may_go_on[name].set()
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= num_begun, 20), self.begun
            return self.begun[:]


def test_a_flood_of_grammars_delays_its_own(source: TableSource) -> None:
    """One tenant has half of the threads; the next one has a free one at once, and goes on with it."""
    compiler = Held(source)
    flood = [compiler.ask(f"a{index}", 1) for index in range(9)]
    assert compiler.after(num_begun=NUM_THREADS // 2) == ["a0", "a1"]
    others = [compiler.ask(name, 2) for name in ("b0", "b1", "a8")]
    assert compiler.after(num_begun=3)[2:] == ["b0"]
    assert compiler.after("b0", num_begun=4)[3:] == ["b1"]
    assert compiler.after("b1", num_begun=5)[4:] == ["a8"], "it takes the turn of either"
    assert compiler.after("a0", num_begun=6)[5:] == ["a2"]
    compiler.after(*(f"a{index}" for index in range(9)), num_begun=11)
    wait([*flood, *others], 20)
    assert others[2] is flood[8]
    assert sorted(compiler.begun) == [*(f"a{index}" for index in range(9)), "b0", "b1"], "each is compiled once"
    assert min(compiler.niceness) > os.getpriority(os.PRIO_PROCESS, 0), "what makes masks goes first"


def test_a_grammar_that_nobody_wants_any_more_is_not_compiled(source: TableSource) -> None:
    compiler, is_wanted = Held(source), True
    held = [compiler.ask(name, 1) for name in ("a0", "a1")]
    dropped = compiler.request(A, 1, lambda: is_wanted)
    last = compiler.ask("a2", 1)
    is_wanted = False
    compiler.after("a0", "a1", "a2", A.text, num_begun=3)
    wait([*held, dropped, last], 20)
    with pytest.raises(CancelledError):
        dropped.result()
    assert sorted(compiler.begun) == ["a0", "a1", "a2"]
    assert compiler.request(A).result(), "it may be asked for again"


def test_a_grammar_that_cannot_be_compiled_is_an_error_each_time(source: TableSource) -> None:
    compiler = Compiler(source)
    for _ in range(2):
        with pytest.raises(GrammarError, match="regex"):
            compiler.request(BAD).result()
    assert not compiler.has(BAD)


def test_what_is_kept_is_bounded_in_bytes(source: TableSource) -> None:
    specs = [GrammarSpec("choices", choices=(f"{number}" * 3000,)) for number in range(4)]
    compiler = Compiler(source, max_bytes=3 * compiled_bytes(specs[0]))
    kept = [compiler.request(spec).result() for spec in specs[:3]]
    assert compiler.request(specs[0]).result() is kept[0]
    compiler.request(specs[3]).result()
    assert [compiler.has(spec) for spec in specs] == [True, False, True, True]
    compiler.forget(specs[0], kept[1])
    assert compiler.has(specs[0]), "it was another one that failed"
    compiler.forget(specs[0], kept[0])
    assert not compiler.has(specs[0])


def test_slow_work_has_a_thread_of_its_own(source: TableSource) -> None:
    threads, compiler, may_go_on = MaskThreads(2), Compiler(source), threading.Event()
    slow, quick = GrammarState(A, compiler, 0), GrammarState(B, compiler, 0)
    begun = [threads.run(state, lambda state=state: state.begin(()), is_slow=True) for state in (slow, quick)]
    wait(begun)
    slow.last_s, quick.last_s = 0.5, 0.0
    held = threads.run(slow, lambda: may_go_on.wait(30) and None)
    for _ in range(3):
        threads.run(quick, lambda: quick.take([])).result(30)
    assert not held.done()
    may_go_on.set()
    held.result(30)
    assert quick.num_masks == 1


@pytest.mark.slow
def test_a_limit_that_others_have_reached_is_no_error(source: TableSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """All count in the lexer that they share; a sequence goes on alone as if there were no others."""
    words = tuple(f"{first}{second}word{first}{second}" for first in "abcdefgh" for second in "mnopqrst")
    spec = GrammarSpec("regex", f"(({'|'.join(words)}) )+")
    table = source.table()

    def walked(compiler: Compiler, text: str) -> GrammarState:
        state = GrammarState(spec, compiler, 0)
        state.begin(())
        state.walk_alone()
        for token in table.tokenize_str(text):
            state.take([token])
            state.walk_alone()
        return state

    needed = lexer_states(source, spec, [f"{word} " for word in words[:1]])
    monkeypatch.setitem(compiling._LIMITS, "max_lexer_states", needed + 4)
    compiler = Compiler(source)
    states = [walked(compiler, f"{word} ") for word in words]
    assert not [state.error for state in states if state.error]
    assert any(state._is_alone for state in states), "the limit was not reached"
    alone = walked(Compiler(source), " ".join(words) + " ")
    assert "states" in alone.error, "together they are too many for one, too"
    assert walked(compiler, " ".join(words) + " ").error == alone.error


def lexer_states(source: TableSource, spec: GrammarSpec, texts: list[str]) -> int:
    """The least limit under which each text can be walked from the beginning."""
    table = source.table()
    with pytest.MonkeyPatch.context() as patch:
        low, high = 1, 4096
        while low < high:
            middle = (low + high) // 2
            patch.setitem(compiling._LIMITS, "max_lexer_states", middle)
            failed = False
            for text in texts:
                state = GrammarState(spec, Compiler(source), 0)
                state.begin(())
                state.walk_alone()
                for token in table.tokenize_str(text):
                    state.take([token])
                    state.walk_alone()
                failed |= bool(state.error)
            low, high = (middle + 1, high) if failed else (low, middle)
    return low
