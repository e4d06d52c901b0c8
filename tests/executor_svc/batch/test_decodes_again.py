"""Steps in which all go on, whose work and tensors are kept, against the same made anew: docs/fast-lanes.md."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.result import SlotError, StepTimings
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch import slots as slots_module
from executor_svc.batch import step_batches, step_result
from executor_svc.batch.forward_batch import ForwardBatch, build_batch
from executor_svc.batch.prompt_rows import prompt_rows
from executor_svc.batch.scheduled import SampledRows, Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_batches import StepBatches
from executor_svc.batch.step_result import Computed, SampledTokens, make_result
from executor_svc.plan.limits import GroupShape, Limits
from tests.helpers.executor.group_plans import in_groups
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence
from tests.helpers.scheduler.fake_executor import LIMITS

STOP = 7
MOST = 30
"""Tokens of a sequence; prompts have up to ten."""
GROUPS = replace(LIMITS, num_device_blocks=256, kv_groups=(GroupShape(0, 2), GroupShape(9, 1)))


class Pair:
    """Slots that keep what they can, and slots that keep nothing, with the same plans."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.kept, self.anew = Slots(limits), Slots(limits)
        self.batches = StepBatches(self.kept)
        self.num_kept = 0

    def schedule(self, step: StepPlan) -> tuple[Scheduled, Scheduled]:
        """The work of a plan in both."""
        before = self.kept._decoding
        with patch.object(slots_module, "changes_slots", return_value=True):
            self.anew.apply(step)
        self.anew._decoding = None
        self.kept.apply(step)
        found, expected = self.kept.schedule(step), self.anew.schedule(step)
        self.num_kept += found is before
        for name in (field.name for field in dataclasses.fields(Scheduled) if field.name != "rows"):
            assert same(getattr(found, name), getattr(expected, name)), name
        return found, expected


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def check_batch(found: ForwardBatch | None, expected: ForwardBatch | None) -> None:
    """The same tensors; block tables may be wider."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    for name in (field.name for field in dataclasses.fields(ForwardBatch)):
        one, other = getattr(found, name), getattr(expected, name)
        if name == "block_tables":
            one = one[..., : other.shape[-1]]
        assert one is other if other is None else torch.equal(torch.as_tensor(one), torch.as_tensor(other)), name


def admit(draw: Any, slot: int) -> AdmittedSequence:
    tokens = draw(st.lists(st.integers(10, 49), min_size=1, max_size=10))
    temperature, prompts = draw(st.sampled_from([0.0, 0.5])), draw(st.sampled_from([None, 2]))
    sampling = SequenceSampling(
        temperature=temperature, stop_token_ids=ints(STOP), min_tokens=draw(st.sampled_from([0, 3])),
        num_prompt_logprobs=prompts, num_candidates=draw(st.sampled_from([0, 0, 0, 4])),
    )  # fmt: skip
    computed = draw(st.sampled_from([0, len(tokens) - 1]))
    return sequence(slot, tokens, [slot * 5, slot * 5 + 1], computed, sampling=sampling, held=draw(st.booleans()))


def changed(draw: Any, slots: Slots) -> dict[str, Any]:
    """Parts of a plan: of every kind that changes who goes on."""
    admitted = np.flatnonzero(slots.admitted).tolist()
    free = [slot for slot in range(6) if slot not in admitted]
    released = [slot for slot in admitted if draw(st.integers(0, 3)) == 0]
    joining = [admit(draw, slot) for slot in free if draw(st.booleans())]
    left = [slot for slot in admitted if slot not in released]
    waiting = [slot for slot in left if slots.num_tokens[slot] == slots.num_computed_tokens[slot]]
    whole = [(each.slot, len(each.token_ids) - each.num_computed_tokens, True) for each in joining if not each.held]
    return {
        "released_slots": ints(*released),
        "admitted": tuple(joining),
        "held_slots": ints(*(slot for slot in left if draw(st.integers(0, 5)) == 0)),
        "resumed_slots": ints(*(slot for slot in left if slots.held[slot] and draw(st.booleans()))),
        "given": columns(*((slot, draw(st.integers(10, 49))) for slot in waiting if not slots.stopped[slot])),
        "scheduled": scheduled(*whole),
    }


def next_plan(draw: Any, slots: Slots) -> StepPlan:
    """Mostly one in which all go on; blocks come as they are needed, or before."""
    fields = changed(draw, slots) if draw(st.integers(0, 3)) == 0 else {}
    gone = set(fields.get("released_slots", ints()).tolist())
    appends = [
        (slot, slot * 5 + int(slots.num_blocks[slot]))
        for slot in np.flatnonzero(slots.admitted).tolist()
        if slot not in gone and slots.num_blocks[slot] < 5
        and (slots.num_tokens[slot] % LIMITS.block_size == 0 or draw(st.integers(0, 4)) == 0)
    ]  # fmt: skip
    return plan(decode_ready=True, appends=columns(*appends), **fields)


@pytest.mark.parametrize("limits", [LIMITS, GROUPS], ids=["one table", "KV groups"])
@given(data=st.data(), num_steps=st.integers(1, 25), few=st.sampled_from([0, step_batches._FEW_ROWS]))
def test_what_is_kept_is_what_would_be_made_anew(limits: Limits, data: st.DataObject, num_steps: int, few: int) -> None:
    with patch.object(step_batches, "_FEW_ROWS", few):
        _check_steps(Pair(limits), data.draw, num_steps)


def _check_steps(pair: Pair, draw: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        if (pair.kept.num_tokens[pair.kept.admitted] > MOST).any():
            return
        found, expected = pair.schedule(in_groups(next_plan(draw, pair.kept), pair.kept.limits))
        places = draw(st.sampled_from([None, np.arange(LIMITS.num_slots) % 3 - 1]))
        check_batch(pair.batches.build(found, places, None), build_batch(pair.anew, expected, places))
        if found.is_one_each:
            assert prompt_rows(pair.kept, found) is None
            assert prompt_rows(pair.anew, dataclasses.replace(expected, is_one_each=False)) is None
        num_rows = len(found.sampling_slots)
        tokens = ints(*(draw(st.sampled_from([STOP, 11, 12, 13])) for _ in range(num_rows)))
        errors = ints(*(draw(st.sampled_from([0] * 9 + [int(SlotError.NON_FINITE_LOGITS)])) for _ in range(num_rows)))
        sampled = SampledTokens(tokens, errors, None)
        pair.kept.commit(found, tokens, sampled.valid)
        pair.anew.commit(expected, tokens, sampled.valid)
        for name in ("num_tokens", "num_computed_tokens", "stopped", "admitted", "held", "token_ids", "tables"):
            assert np.array_equal(getattr(pair.kept, name), getattr(pair.anew, name)), name


@pytest.mark.parametrize("limits", [LIMITS, GROUPS], ids=["one table", "KV groups"])
def test_decodes_that_go_on_are_kept(limits: Limits) -> None:
    """Or the test above would compare nothing."""
    pair = Pair(limits)
    joining = tuple(sequence(slot, [20, 21, 22], [slot * 5, slot * 5 + 1], 0) for slot in range(3))
    first = plan(admitted=joining, scheduled=scheduled(*((slot, 3, True) for slot in range(3))))
    for step in (in_groups(first, limits), *[plan(decode_ready=True)] * 5):
        found, expected = pair.schedule(step)
        before = pair.batches._decode
        check_batch(pair.batches.build(found, None, None), build_batch(pair.anew, expected))
        kept_batch = before is not None and pair.batches._decode is before
        for slots, work in ((pair.kept, found), (pair.anew, expected)):
            slots.commit(work, ints(11, 12, 13), np.ones(3, np.bool_))
    assert pair.num_kept == 4
    assert kept_batch


@given(num_slots=st.integers(1, 5), logprobs=st.booleans())
def test_a_result_of_tokens_alone_is_as_any_other(num_slots: int, logprobs: bool) -> None:
    """Every field."""
    rows = np.arange(num_slots)
    work = Scheduled(rows, rows * 0 + 1, rows >= 0, rows[:0], rows, None, rows[:0], is_one_each=True)
    found = None
    if logprobs:
        found = step_result.RowLogprobs(
            rows, rows.astype(np.float32), rows + 1, rows * 0 + 1, rows[:, None], rows[:, None].astype(np.float32)
        )
    computed = Computed(SampledTokens(rows + 20, rows * 0, found), rows + 3, device_ns=5, sample_ns=6)
    one = make_result(4, work, computed, StepTimings(1, 2, 3, 4), b"digest")
    with patch.object(step_result, "_result_of_tokens", side_effect=AssertionError):
        other = make_result(
            4, dataclasses.replace(work, is_one_each=False), computed, StepTimings(1, 2, 3, 4), b"digest"
        )
    for field in dataclasses.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        plain = not isinstance(mine, dict | StepTimings) and hasattr(mine, "__len__") and not isinstance(mine, str)
        assert type(mine) is type(theirs), field.name
        assert (list(mine) == list(theirs)) if plain else (mine == theirs), field.name


def test_rows_follow_the_work() -> None:
    work = Scheduled(ints(1, 2), ints(1, 1), np.ones(2, np.bool_), ints(), ints(1, 2), None, ints(), is_one_each=True)
    drafted = work.with_drafts(ints(1, 0))
    assert work.rows == SampledRows(work.sampling_slots, None, None, work.candidates)
    assert drafted.rows is drafted.drafted
    assert not drafted.is_one_each
    assert not work.with_idle(np.array([True, False])).is_one_each
