"""Whom a step waits for: nobody, where a row has no grammar; with drafts too."""

from __future__ import annotations

import threading
from concurrent import futures
from typing import Any

import pytest

from cadenza_common.grammar.spec import GrammarSpec
from executor_svc.speculation.ngram import NgramSource
from executor_svc.startup.grammars import find_grammars, with_grammars
from executor_svc.structured import mask_threads, slot_grammars
from executor_svc.structured.matcher import GrammarState
from executor_svc.structured.slot_grammars import SlotGrammars
from executor_svc.worker.step import StepExecutor
from tests.checkpoints import make_llama
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import scheduled, sequence
from tests.helpers.executor.stepping import Stepper

FORCED, OTHER = GrammarSpec("regex", "a{40}b"), GrammarSpec("regex", "c{40}d")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300))


class Waits:
    """The waits of steps, on a clock of their own: slot 0 is not done in any time, the others at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grammars: SlotGrammars) -> None:
        self._grammars, self._now = grammars, 0.0
        monkeypatch.setattr(slot_grammars, "_wait_for", self._wait_for)
        monkeypatch.setattr(slot_grammars, "time", self)

    def monotonic(self) -> float:
        return self._now

    def _wait_for(self, work: futures.Future[None], seconds: float) -> None:
        if work is self._grammars._slots[0].work:
            self._now += seconds + 1e-6
        else:
            work.result(30)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The work on grammars with FORCED waits for this, from the first mask on."""
    may_go_on, take = threading.Event(), GrammarState.take

    def held_take(state: GrammarState, token_ids: list[int]) -> None:
        assert state.spec != FORCED or may_go_on.wait(30)
        take(state, token_ids)

    monkeypatch.setattr(GrammarState, "take", held_take)
    monkeypatch.setattr(mask_threads, "SLOW_S", -1.0)  # a thread for each
    yield may_go_on
    may_go_on.set()


def begun(model: Model, *grammars: GrammarSpec | None) -> tuple[Stepper, StepExecutor]:
    """Sequences with these grammars, of which each has its first token."""
    found = find_grammars(model.loaded)
    assert found is not None
    stepper = Stepper(model, num_slots=16, max_drafts=4, grammars=found)
    executor = stepper.executor
    source = with_grammars(NgramSource(executor.limits), executor.grammars)
    executor._drafting._source = source
    admitted = tuple(
        sequence(slot, [5, 9 + slot], Stepper.blocks(slot), grammar=grammar, max_drafts=4 if grammar else 0)
        for slot, grammar in enumerate(grammars)
    )
    executor.grammars.recorded = lambda _: False  # all are waited for
    stepper.step(admitted=admitted, scheduled=scheduled(*((slot, 2, True) for slot in range(len(grammars)))))
    executor.grammars.recorded = None
    return stepper, executor


def counts(stepper: Stepper) -> list[int]:
    """How many tokens each slot gets in a step with drafts."""
    result = stepper.step(decode_ready=True, max_drafts=4)
    return result.num_tokens.tolist() if len(result.num_tokens) else [1] * len(result.slots)


def test_plain_rows_do_not_wait_for_drafts_that_are_forced(
    model: Model, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper, executor = begun(model, FORCED, None)
    waits = Waits(monkeypatch, executor.grammars)
    for _ in range(3):
        assert counts(stepper) == [0, 1]
    assert waits.monotonic() == 0
    held.set()
    executor.grammars.recorded = lambda _: False
    assert counts(stepper) == [5, 1]


def test_rows_with_grammars_wait_for_each_other_once(
    model: Model, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is late in spite of that is not waited for again by those who could go on."""
    stepper, executor = begun(model, FORCED, OTHER)
    waits = Waits(monkeypatch, executor.grammars)
    waited = []
    for number in range(3):
        executor.grammars._slots[1].work.result(30)
        assert counts(stepper) == [0, 5], number
        waited.append(waits.monotonic())
    assert 0 < waited[0] == waited[1] == waited[2], "only in the first step"
    held.set()
    executor.grammars.recorded = lambda _: False
    assert counts(stepper) == [5, 5]
