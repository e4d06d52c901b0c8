"""Results off the wire: errors with their kinds; columns of prompt logprobs and candidates that fit or are refused."""

from __future__ import annotations

import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan.errors import ProtocolError
from cadenza_common.plan.result import Candidates, SlotError, StepTimings
from cadenza_common.plan_wire.results import result_from_wire, result_in_slices
from cadenza_common.serving.slices import run_at_once


def entry(slot=4, start=1, **changes) -> pb.SlotLogprobs:
    columns = {
        "chosen_logprobs": [-1.0, -2.0], "chosen_ranks": [1, 2], "num_top": 2, "top_token_ids": [5, 6, 7, 8],
        "top_logprobs": [-0.5, -1.0, -0.25, -2.0],
    } | changes  # fmt: skip
    return pb.SlotLogprobs(slot=slot, start=start, columns=types_pb2.LogprobColumns(**columns))


def result(*entries, **fields) -> pb.StepResult:
    return pb.StepResult(step_id=9, status=pb.STEP_STATUS_OK, prompt_logprobs=entries, **fields)


def test_prompt_logprobs_by_slot() -> None:
    read = result_from_wire(result(entry(4), entry(2, start=7, num_top=0, top_token_ids=[], top_logprobs=[])))
    four, two = read.prompt_logprobs[4], read.prompt_logprobs[2]
    assert (four.start, four.end, list(four.logprobs), list(four.ranks)) == (1, 3, [-1.0, -2.0], [1, 2])
    assert (four.num_top, list(four.top_token_ids)) == (2, [5, 6, 7, 8])
    assert list(four.top_logprobs) == [-0.5, -1.0, -0.25, -2.0]
    assert (two.start, two.end, two.num_top, len(two.top_token_ids)) == (7, 9, 0, 0)
    rows = four.rows(2, 3)
    assert (rows.start, rows.end, list(rows.logprobs), list(rows.top_token_ids)) == (2, 3, [-2.0], [7, 8])


@pytest.mark.parametrize(
    "entries",
    [
        [entry(start=0)],
        [entry(chosen_ranks=[1])],
        [entry(num_top=1)],
        [entry(num_top=3)],
        [entry(top_logprobs=[-1.0])],
        [entry(chosen_logprobs=[], chosen_ranks=[], top_token_ids=[], top_logprobs=[])],
        [entry(), entry()],
    ],
)
def test_columns_that_do_not_fit_are_refused(entries) -> None:
    with pytest.raises(ProtocolError, match="prompt"):
        result_from_wire(result(*entries))


def test_results_are_the_same_in_slices_and_at_once() -> None:
    plain = {"slots": [1, 4], "token_ids": [7, 8], "timings": pb.StepTimings(total_ns=5)}
    for message in (result(**plain), result(entry(4), **plain), result(**plain, error_slots=[4], errors=[2])):
        assert result_from_wire(message) == run_at_once(result_in_slices(message))
    for wrong in ({"slots": [1]}, {"slots": [1], "num_tokens": [2]}, {"error_slots": [1]}):
        with pytest.raises(ProtocolError, match="result of step 9"):
            result_from_wire(result(**wrong))


def test_errors_have_their_kinds() -> None:
    message = result(
        error_slots=[1, 2, 3], errors=[pb.SLOT_ERROR_NON_FINITE_LOGITS, pb.SLOT_ERROR_NO_ALLOWED_TOKEN, 77]
    )
    assert result_from_wire(message).errors == [
        SlotError.NON_FINITE_LOGITS,
        SlotError.NO_ALLOWED_TOKEN,
        SlotError.UNSPECIFIED,
    ]
    with pytest.raises(ProtocolError, match="1 errors of 2 slots"):
        result_from_wire(result(error_slots=[1, 2], errors=[1]))


def candidates(slot=4, token_ids=(7, 3), logprobs=(-0.5, -1.0)) -> pb.SlotCandidates:
    return pb.SlotCandidates(slot=slot, token_ids=token_ids, logprobs=logprobs)


def test_candidates_by_slot_digest_and_times() -> None:
    timings = pb.StepTimings(queue_ns=1, device_ns=2, sample_ns=3, total_ns=4, moves_ns=5)
    rows = [candidates(), candidates(2, [0], [-0.25])]
    read = result_from_wire(
        result(slots=[2, 4], num_tokens=[0, 0], candidates=rows, debug_digest=b"\x01\xff", timings=timings)
    )
    assert read.candidates == {4: Candidates([7, 3], [-0.5, -1.0]), 2: Candidates([0], [-0.25])}
    assert read.debug_digest == b"\x01\xff"
    assert read.timings == StepTimings(queue_ns=1, device_ns=2, sample_ns=3, total_ns=4, moves_ns=5)
    plain = result_from_wire(result())
    assert (plain.candidates, plain.debug_digest, plain.timings) == ({}, b"", StepTimings())


@pytest.mark.parametrize(
    "rows",
    [
        [candidates(token_ids=[], logprobs=[])],
        [candidates(token_ids=[7])],
        [candidates(logprobs=[-0.5])],
        [candidates(), candidates(2), candidates()],
    ],
)
def test_candidates_that_do_not_fit_are_refused(rows) -> None:
    with pytest.raises(ProtocolError, match="candidates"):
        result_from_wire(result(candidates=rows))
