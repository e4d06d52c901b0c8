"""Long grammars: long GBNF is converted in another process, and a slow first mask has a thread of its own."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from cadenza_common.grammar import gbnf
from cadenza_common.grammar.compiling import GrammarError, to_grammar
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource, table_source
from executor_svc.structured.compiler import Compiled, Compiler
from executor_svc.structured.mask_threads import SLOW_S, MaskThreads, MaskWork
from executor_svc.structured.matcher import GrammarState
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow

LONG = "root ::= " + " | ".join(f"r{i}" for i in range(200)) + "\n"
LONG += "".join(f'r{i} ::= "a{i}" [a-z]+\n' for i in range(200))


@pytest.fixture(scope="module")
def source() -> TableSource:
    found = table_source(str(ROOT / "models" / "cadenza-demo"), 2048, [1])
    assert found is not None
    return found


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    run, started = subprocess.run, list[str]()

    def recorded(command: list[str], **options: object) -> object:
        started.append(command[-1])
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(gbnf.subprocess, "run", recorded)
    return started


def test_long_gbnf_is_converted_in_another_process(processes: list[str]) -> None:
    spec = GrammarSpec("grammar", LONG)
    assert to_grammar(spec, None, apart=True) == to_grammar(spec, None)
    assert processes == ["cadenza_common.grammar.gbnf"]


def test_short_gbnf_and_lark_are_not(processes: list[str]) -> None:
    lark = "start: " + " | ".join(f'"a{i}"' for i in range(2000))
    for text in ('root ::= "a"', lark):
        to_grammar(GrammarSpec("grammar", text), None, apart=True)
    assert processes == []


def test_its_error_is_the_converters() -> None:
    spec = GrammarSpec("grammar", LONG + "r ::= (((\n")
    messages = []
    for apart in (True, False):
        with pytest.raises(GrammarError) as error:
            to_grammar(spec, None, apart=apart)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_the_first_mask_is_made_where_the_grammar_is_compiled(
    source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, warm = list[str](), Compiled.warm

    def recorded(compiled: Compiled, vocab_size: int) -> None:
        threads.append(threading.current_thread().name)
        warm(compiled, vocab_size)

    monkeypatch.setattr(Compiled, "warm", recorded)
    compiled = Compiler(source).request(GrammarSpec("regex", "a+")).result()
    assert [name.partition("_")[0] for name in threads] == ["compiling"]
    assert compiled.first_s > 0


@pytest.mark.parametrize(("first_s", "name"), [(SLOW_S / 2, "masks"), (2 * SLOW_S, "grammars")])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_slow_first_mask_has_a_thread_of_its_own(
    source: TableSource, first_s: float, name: str, is_there: bool
) -> None:
    state = GrammarState(GrammarSpec("regex", "a+"), Compiler(source), 0)
    after, threads = Future[Compiled](), list[str]()
    compiled = Compiled(None, first_s=first_s)
    if is_there:
        after.set_result(compiled)
    done = MaskThreads(4).run(state, lambda: threads.append(threading.current_thread().name), after=after)
    if not is_there:
        after.set_result(compiled)
    done.result(20)
    assert [each.partition("_")[0] for each in threads] == [name]


class Working(GrammarState):
    """A state whose tokens are work of any kind."""

    def __init__(self, source: TableSource, work: Callable[[], object]) -> None:
        super().__init__(GrammarSpec("regex", "a+"), Compiler(source), 0)
        self._work = work

    def take(self, token_ids: Sequence[int]) -> None:
        self._work()


def begun(source: TableSource) -> GrammarState:
    return GrammarState(GrammarSpec("regex", "a+"), Compiler(source), 0)


@pytest.mark.parametrize("is_polled", [False, True])
def test_a_mask_that_is_slow_unawares_delays_no_others(source: TableSource, is_polled: bool) -> None:
    """As often as that happens: the thread that takes over is relieved like the first."""
    threads, masks, made = MaskThreads(4), list[str](), threading.Semaphore(0)
    waits = [threading.Event() for _ in range(3)]

    def mask() -> None:
        masks.append(threading.current_thread().name)
        made.release()

    slow = list[MaskWork]()
    for wait in waits:
        entered = threading.Event()
        held = Working(source, lambda wait=wait, entered=entered: (entered.set(), wait.wait(20)))  # type: ignore[misc]
        found = threads.take_each([(held, [1]), (Working(source, mask), [1])])
        slow.append(found[0])
        assert entered.wait(20)
        time.sleep(2 * SLOW_S)
        if is_polled:
            threads.relieve()
            assert made.acquire(timeout=20)
    threads.run(begun(source), mask)
    time.sleep(2 * SLOW_S)
    threads.relieve()
    for _ in range(1 if is_polled else 4):
        assert made.acquire(timeout=20)
    assert not any(done.done() for done in slow)
    assert {name.partition("_")[0] for name in masks} == {"masks"}
    assert len(masks) == 4
    for wait in waits:
        wait.set()
    for done in slow:
        done.result(20)
    threads.run(begun(source), mask).result(20)
    assert len(masks) == 5


def test_one_thread_for_all_that_wait_for_a_lexer(source: TableSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with other grammars go on, and to have waited is not to be slow."""
    compiler, names, take, other = Compiler(source), list[str](), GrammarState.take, threading.Event()

    def noted(state: GrammarState, token_ids: Sequence[int]) -> None:
        names.append(threading.current_thread().name)
        take(state, token_ids)
        if state.spec.text == "b+":
            other.set()

    monkeypatch.setattr(GrammarState, "take", noted)
    states = [GrammarState(GrammarSpec("regex", text), compiler, 0) for text in ("a+", "a+", "a+", "b+")]
    for state in states:
        state.begin(())
    ids = [source.table().tokenize_str(text)[0] for text in "aaab"]
    assert states[0].compiled is not None
    with states[0].compiled.lock:
        works = MaskThreads(4).take_each([(state, [token]) for state, token in zip(states, ids, strict=True)])
        assert other.wait(20)
        time.sleep(2 * SLOW_S)
        assert not any(work.done() for work in works[:3])
    for work in works:
        work.result(20)
    assert [name.partition("_")[0] for name in names].count("grammars") == 3
    assert len(set(names)) == 2
    assert [state.num_masks for state in states] == [1] * 4
    assert max(state.last_s for state in states) < SLOW_S


def test_what_walks_alone_yields_to_others(source: TableSource) -> None:
    """It compiles its grammar again."""
    nice = list[int]()

    class Failed(GrammarState):
        def walk_alone(self) -> None:
            nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    state = Failed(GrammarSpec("regex", "a+"), Compiler(source), 0)
    state.must_walk = True
    MaskThreads(4).run(state, lambda: None).result(20)
    assert nice == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)]
