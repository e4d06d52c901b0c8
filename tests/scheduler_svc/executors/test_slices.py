"""Long plans and results are converted in slices, on both sides: the same messages, and little work between pauses."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.plan import AdmittedSequence, PrefixSource, StepPlan
from cadenza_common.plan.result import LogprobColumns, StepResult
from cadenza_common.plan_wire import columns
from cadenza_common.plan_wire.reading import plan_in_slices
from cadenza_common.plan_wire.results import response_in_slices, result_in_slices
from cadenza_common.plan_wire.writing import request_in_slices
from cadenza_common.serving.slices import SLICE_ITEMS, run_at_once
from executor_svc.plan.arrays import float_column
from tests.helpers.core.core_sampling import core_sampling

LONG = tuple(range(8 * SLICE_ITEMS))
ALLOWED = tuple(range(4 * SLICE_ITEMS))


def sequence(slot: int, token_ids: tuple[int, ...], **fields: Any) -> AdmittedSequence:
    sampling = core_sampling(**({"allowed_token_ids": ALLOWED} if slot == 0 else {}))
    return AdmittedSequence(slot, token_ids, len(LONG), 0, tuple(range(64)), sampling, slot, **fields)


def long_plan() -> StepPlan:
    """A long prompt, and samples that take it from its slot."""
    siblings = [sequence(slot, (), source=PrefixSource(0, len(LONG), 60)) for slot in range(1, 40)]
    return StepPlan(7, 0, admitted=[sequence(0, LONG), *siblings])


def test_a_plan_is_filled_in_slices() -> None:
    request = run_at_once(request_in_slices(long_plan(), 3))
    assert (request.plan.step_id, request.plan.epoch, len(request.plan.admitted)) == (7, 3, 40)
    first, second = request.plan.admitted[0], request.plan.admitted[1]
    assert tuple(first.token_ids) == LONG
    assert tuple(first.sampling.allowed_token_ids) == ALLOWED
    assert not first.HasField("source")
    assert (len(second.token_ids), second.source) == (0, pb.PrefixSource(slot=0, num_tokens=len(LONG), num_blocks=60))
    assert list(second.block_tables[0].block_ids) == [60, 61, 62, 63]
    # The long lists alone are twelve slices.
    assert sum(1 for _ in request_in_slices(long_plan(), 3)) >= 12


def test_a_short_plan_is_filled_without_a_pause() -> None:
    plan = StepPlan(7, 0, admitted=[sequence(1, (1, 2, 3))], released_slots=[4])
    assert list(request_in_slices(plan, 3)) == []


def test_a_plan_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    request = pb.ExecuteRequest.FromString(run_at_once(request_in_slices(long_plan(), 3)).SerializeToString())
    read: list[int] = []
    monkeypatch.setattr(columns, "array", lambda code, values=(): read.append(len(values)) or array(code, values))
    counts: list[int] = []
    work = plan_in_slices(request.plan)
    while True:
        try:
            next(work)
        except StopIteration as end:
            plan = end.value
            break
        counts.append(sum(read))
        read.clear()
    assert max(*counts, sum(read)) <= 2 * SLICE_ITEMS
    assert plan.admitted[0].token_ids.tolist() == list(LONG)
    assert plan.admitted[0].sampling.allowed_token_ids.tolist() == list(ALLOWED)
    assert plan.admitted[1].source == PrefixSource(0, len(LONG), 60)


def test_the_logprobs_of_many_sequences_travel_in_slices() -> None:
    num_sequences, num_top = 512, 20
    entries = {
        slot: LogprobColumns(
            start=0,
            logprobs=array("f", [-slot]),
            ranks=array("q", [slot + 1]),
            num_top=num_top,
            top_token_ids=array("q", range(slot, slot + num_top)),
            top_logprobs=array("f", [-1.0] * num_top),
        )
        for slot in range(num_sequences)
    }
    slots = array("q", range(num_sequences))
    result = StepResult(5, slots=slots, token_ids=slots, logprobs=entries)
    response = run_at_once(response_in_slices(result, 3, 4))
    assert len(list(response_in_slices(result, 3, 4))) >= 3
    read = run_at_once(result_in_slices(response.result)).logprobs
    # One pause comes first: parsing the message was a slice.
    assert len(list(result_in_slices(response.result))) >= 3
    assert [read[slot].ranks[0] for slot in range(num_sequences)] == list(range(1, num_sequences + 1))
    assert list(read[7].tokens()[0].top_token_ids) == list(range(7, 7 + num_top))
    few = StepResult(5, slots=slots[:9], token_ids=slots[:9], logprobs=dict(list(entries.items())[:9]))
    assert not list(response_in_slices(few, 3, 4))
    assert not list(result_in_slices(run_at_once(response_in_slices(few, 3, 4)).result))


def test_many_small_admissions_are_filled_after_the_plan() -> None:
    """Planning 64 of them takes 2 ms, and filling the message 1 ms."""
    many = [AdmittedSequence(slot, (1, 2, 3), 3, 0, (5,), core_sampling(), 0) for slot in range(64)]
    assert len(list(request_in_slices(StepPlan(7, 0, admitted=many), 3))) == 1


def test_prompt_logprobs_travel_in_slices() -> None:
    num_tokens, num_top = 4096, 20
    entry = LogprobColumns(
        start=1,
        logprobs=float_column(np.linspace(-9, 0, num_tokens)),
        ranks=array("q", range(1, num_tokens + 1)),
        num_top=num_top,
        top_token_ids=array("q", range(num_tokens * num_top)),
        top_logprobs=float_column(np.linspace(-9, 0, num_tokens * num_top)),
    )
    result = StepResult(5, prompt_logprobs={2: entry})
    num_values = num_tokens * num_top
    response = run_at_once(response_in_slices(result, 3, 4))
    assert len(list(response_in_slices(result, 3, 4))) >= num_values // SLICE_ITEMS
    read = run_at_once(result_in_slices(response.result)).prompt_logprobs[2]
    assert len(list(result_in_slices(response.result))) >= num_values // SLICE_ITEMS
    assert read.top_token_ids.tolist() == entry.top_token_ids.tolist()
    assert np.array_equal(np.array(read.top_logprobs, np.float32), entry.top_logprobs)
    assert (read.start, len(read.logprobs), read.num_top) == (1, num_tokens, num_top)
