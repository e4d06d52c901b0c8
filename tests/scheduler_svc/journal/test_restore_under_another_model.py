"""Requests of a journal whose next process has executors with another model, other numerics or other limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.convert.generation import request_fields
from scheduler_svc.core.errors import (
    DataLossError,
    PreconditionError,
    RequestRejectedError,
    WaitingQueueFullError,
)
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.journal.restore import Restored
from scheduler_svc.requests.grammar_door import GrammarDoor
from tests.helpers.scheduler.journals import stored
from tests.scheduler_svc.journal.restarts import EXACT, FAST, process, read


async def test_end_ids_are_those_of_the_admission(tmp_path: Path) -> None:
    """The generation config of the model may have changed, which the fingerprint does not cover."""
    async with process(tmp_path) as first:
        message = pb.GenerateRequest(request_id="r", prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[5]))])
        first.world.engine.submit(first.builder.build(request_fields(message), now=0.0, time_left_s=None))
        await first.steps(3)
    async with process(tmp_path, replace(EXACT, eos_token_ids=(9,)), at_s=1.0) as second:
        await second.steps(5)
        assert second.world.engine.find("", "r").num_completion_tokens == 5


async def test_under_another_fingerprint_what_was_shown_is_lost_and_the_rest_begins_anew(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        for index in range(4):
            first.submit(f"shown {index}", 4000)
        first.submit("waited", params={"temperature": 0.5})
        await first.steps(3)
    other = replace(EXACT, fingerprint=b"other")
    async with process(tmp_path, other, at_s=1.0) as second:
        assert second.restored == Restored(num_unfinished=1, num_lost=4)
        engine = second.world.engine
        lost = engine.find("", "shown 0")
        assert isinstance(lost.error, DataLossError)
        assert (lost.ended, read(lost)) == (True, ([], None))
        assert "another numerics fingerprint than when this request began" in str(lost.error)
        await second.steps(25)
        assert read(engine.find("", "waited")) == ([9] * 20, FinishDetail.MAX_TOKENS)
    # It had shown output under the new fingerprint, which is the one in the journal now.
    (row,) = [each for each in stored(tmp_path) if each.admission.request_id == "waited"]
    assert (row.admission.fingerprint, row.started) == (b"other", True)
    # And with the first executor back, the others go on.
    async with process(tmp_path, at_s=2.0) as third:
        assert third.restored == Restored(num_unfinished=4, num_ended=1)


@pytest.mark.parametrize(("vocab_size", "found"), [(64, Restored(num_unfinished=1)), (65, Restored(num_lost=1))])
async def test_stored_tokens_go_on_under_another_fingerprint_if_that_is_allowed(
    tmp_path: Path, vocab_size: int, found: Restored
) -> None:
    async with process(tmp_path, FAST) as first:
        first.submit()
        await first.steps(3)
    other = replace(FAST, fingerprint=b"other", vocab_size=vocab_size)
    async with process(tmp_path, other, at_s=1.0) as second:
        assert second.restored == Restored(num_lost=1)
    async with process(tmp_path, other, at_s=1.0, allow_fingerprint_change=True) as third:
        assert third.restored == found


async def test_a_request_that_the_executor_cannot_hold_any_more_ends_alone(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        first.submit("wide", params={"n": 4, "temperature": 0.5})
        first.submit("small")
        await first.steps(2)
    async with process(tmp_path, replace(EXACT, max_num_seqs=2), at_s=1.0) as second:
        assert second.restored == Restored(num_unfinished=1, num_lost=1)
        wide = second.world.engine.find("", "wide")
        assert isinstance(wide.error, PreconditionError)
        await second.steps(25)
        assert read(second.world.engine.find("", "small"))[1] is FinishDetail.MAX_TOKENS


class OneAnswer(GrammarDoor):
    """Answers every constraint with this error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def check(self, *_: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WaitingQueueFullError("takes over 10 s to compile", 10.0), Restored(num_unfinished=1, num_lost=4)),
        (RequestRejectedError("grammar", "another version refuses it"), Restored(num_lost=5)),
    ],
)
async def test_a_constraint_that_there_is_no_time_for_now_was_compiled_before(
    tmp_path: Path, error: Exception, expected: Restored
) -> None:
    """Under other numerics a request begins anew, and is checked anew: what the moment refuses is not lost."""
    model = replace(FAST, grammar_engine=b"engine")
    async with process(tmp_path, model) as first:
        for index in range(4):
            first.submit(f"shown {index}", 4000)
        first.submit("constrained", params={"grammar": types_pb2.GrammarSpec(json_object=True)})
    other = replace(model, fingerprint=b"other", grammar_engine=b"other engine")
    async with process(tmp_path, other, at_s=1.0, grammars=OneAnswer(error)) as second:
        assert second.restored == expected
