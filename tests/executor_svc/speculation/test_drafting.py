"""Drafts in a step: how many a slot may have, which rows check them, what is accepted and what remains of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import SlotError, StepTimings
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.forward_batch import build_batch
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import Computed, RowLogprobs, SampledTokens, make_result
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafting import Drafting
from executor_svc.speculation.drafts import Drafts
from executor_svc.speculation.verification import accept_drafts
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence

LIMITS = Limits(
    num_slots=8, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=40, vocab_size=50, max_logprobs=5,
    block_size=4, num_device_blocks=64, num_host_blocks=0, max_inflight_plans=3, max_drafts=6,
)  # fmt: skip


class Fixed:
    """Drafts by slot, as many of them as are allowed."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self.drafts = drafts
        self.asked: dict[int, int] = {}
        self.calls: list[tuple[Any, ...]] = []

    def admitted(self, slot: int, scope: int) -> None:
        self.calls.append(("admitted", slot, scope))

    def follow(self, step: StepPlan) -> None:
        self.calls.append(("follow", step.step_id))

    def released(self, slots: np.ndarray) -> None:
        self.calls.append(("released", *slots.tolist()))

    def committed(self, slots, scheduled, starts):
        pass

    def clear(self) -> None:
        self.calls.append(("clear",))

    def looks(self, slots: Slots, rows: np.ndarray) -> bool:
        return True

    def propose(self, slots: Slots, rows: np.ndarray, most: np.ndarray) -> Drafts:
        self.asked = dict(zip(rows.tolist(), most.tolist(), strict=True))
        made = [self.drafts.get(slot, [])[:count] for slot, count in self.asked.items()]
        return Drafts(ints(*map(len, made)), ints(*(token for each in made for token in each)))


def begin(drafts: dict[int, list[int]], limits: Limits = LIMITS, **sequences: Any) -> tuple[Slots, Drafting, Fixed]:
    """Slots with two computed tokens each and a third that is not; the keywords: more of a slot, by its name."""
    slots, source = Slots(limits), Fixed(drafts)
    drafting = Drafting(slots, source)
    admitted = [
        sequence(slot, [9, 8, 7], list(range(8 * slot, 8 * slot + 5)), computed=2, prompt=2, **{"max_drafts": 6} | more)
        for slot, more in ((int(name.removeprefix("slot")), more) for name, more in sequences.items())
    ]
    step = plan(admitted=tuple(admitted))
    slots.apply(step)
    drafting.follow(step)
    return slots, drafting, source


def run(slots: Slots, drafting: Drafting, tokens: list[int] | Callable[[list[int]], int], **fields: Any) -> Any:
    """One step in which the rows get these tokens, or those that follow the tokens before them; returns its result."""
    step = plan(**{"decode_ready": True, "max_drafts": 6} | fields)
    slots.apply(step)
    work = drafting.add(step, slots.schedule(step))
    lengths = slots.num_tokens[work.rows.slots] + (0 if work.rows.ahead is None else work.rows.ahead)
    places = zip(work.rows.slots.tolist(), lengths.tolist(), strict=True)
    sampled = [tokens(slots.token_ids[at, :end].tolist()) for at, end in places] if callable(tokens) else tokens
    errors = ints(*(0 if token >= 0 else int(SlotError.NON_FINITE_LOGITS) for token in sampled))
    rows = np.arange(len(sampled))
    logprobs = RowLogprobs(rows, -rows.astype(np.float32), rows + 1, rows * 0 + 1, rows[:, None], -rows[:, None] / 2)
    found = accept_drafts(slots, work, SampledTokens(ints(*sampled), errors, logprobs))
    slots.commit(work, found.token_ids, found.valid)
    return make_result(1, work, Computed(found, lengths), StepTimings(), b"")


def test_the_batch_has_drafts_and_a_row_of_logits_behind_each() -> None:
    slots, drafting, _ = begin({0: [1, 2], 2: [3]}, slot0={}, slot1={}, slot2={})
    step = plan(decode_ready=True, max_drafts=6)
    work = drafting.add(step, slots.schedule(step))
    batch = build_batch(slots, work)
    assert batch is not None
    assert batch.token_ids.tolist() == [7, 1, 2, 7, 7, 3]
    assert batch.positions.tolist() == [2, 3, 4, 2, 2, 3]
    assert batch.logits_rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.seq_lens.tolist() == [5, 3, 4]
    assert (work.rows.slots.tolist(), work.rows.ahead.tolist()) == ([0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 0, 1])
    assert work.logits_slots.tolist() == [0, 0, 0, 1, 2, 2]


def test_drafts_are_accepted_up_to_the_first_that_is_not_sampled() -> None:
    slots, drafting, _ = begin({0: [1, 2, 3], 1: [4], 2: [5, 6]}, slot0={}, slot1={}, slot2={})
    result = run(slots, drafting, [1, 2, 40, 41, 30, 31, 5, 6, 7])
    assert result.slots.tolist() == [0, 1, 2]
    assert result.num_tokens.tolist() == [3, 1, 3]
    assert (result.num_drafts.tolist(), result.num_accepted.tolist()) == ([3, 1, 2], [2, 0, 2])
    assert result.token_ids.tolist() == [1, 2, 40, 30, 5, 6, 7]
    assert slots.num_tokens[:3].tolist() == [6, 4, 6]
    assert slots.num_computed_tokens[:3].tolist() == [5, 3, 5]
    assert slots.token_ids[0, :6].tolist() == [9, 8, 7, 1, 2, 40]
    assert [(slot, each.start, each.ranks.tolist()) for slot, each in result.logprobs.items()] == [
        (0, 3, [1, 2, 3]), (1, 3, [5]), (2, 3, [7, 8, 9]),
    ]  # fmt: skip


def test_tokens_end_at_a_stop_token_and_at_the_greatest_length() -> None:
    stops = {"sampling": SequenceSampling(stop_token_ids=ints(2))}
    slots, drafting, source = begin({0: [1, 2, 3], 1: [1, 1, 1]}, slot0=stops, slot1={"max_len": 5})
    result = run(slots, drafting, [1, 2, 3, 4, 1, 1])
    assert source.asked == {0: 6, 1: 1}
    assert (result.num_tokens.tolist(), result.token_ids.tolist()) == ([2, 2], [1, 2, 1, 1])
    assert slots.stopped[:2].all()
    assert run(slots, drafting, []).slots.tolist() == []


def test_a_row_that_fails_behind_a_draft_fails_once_it_is_the_first() -> None:
    slots, drafting, source = begin({0: [1, 2]}, slot0={})
    result = run(slots, drafting, [1, -1, 5])
    assert (result.token_ids.tolist(), result.error_slots.tolist()) == ([1], [])
    source.drafts = {}
    failed = run(slots, drafting, [-1])
    assert (failed.num_tokens.tolist(), failed.error_slots.tolist()) == ([0], [0])
    assert slots.stopped[0]


def test_who_has_no_drafts() -> None:
    """Slots without any allowed, listed by name, forks and their sources, and all without the plan's leave."""
    slots, drafting, source = begin(
        {slot: [1, 2] for slot in range(5)}, slot0={"max_drafts": 0}, slot1={}, slot2={}, slot3={}
    )
    result = run(slots, drafting, [5, 6, 1, 2, 7, 1, 2, 9], scheduled=scheduled((1, 1, True)))
    assert source.asked == {2: 6, 3: 6}
    assert result.num_drafts.tolist() == [0, 0, 2, 2]
    assert not len(run(slots, drafting, [1, 2, 3, 4], max_drafts=0).num_drafts)


def test_forks_read_the_first_row_of_their_source() -> None:
    slots, drafting, source = begin({0: [1], 1: [2], 2: [3, 4]}, slot0={}, slot1={}, slot2={})
    step = plan(
        admitted=(sequence(5, [9, 8, 7], [60], computed=2, prompt=2, max_drafts=6, held=True),),
        decode_ready=True, max_drafts=6, forks=columns((5, 1)),
    )  # fmt: skip
    slots.apply(step)
    work = drafting.add(step, slots.schedule(step))
    assert source.asked == {0: 6, 2: 6}
    assert (work.rows.slots.tolist(), work.rows.sources.tolist()) == ([0, 0, 1, 2, 2, 2, 5], [0, 1, 2, 3, 4, 5, 2])
    assert work.rows.ahead.tolist() == [0, 1, 0, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("num_blocks", "max_len", "room"), [(1, 40, 0), (2, 40, 3), (3, 40, 6), (2, 9, 5), (1, 5, 1), (4, 6, 2)]
)
def test_a_place_is_left_for_each_plan_that_may_follow(num_blocks: int, max_len: int, room: int) -> None:
    """Unless the table reaches the greatest length: of 4 places a block, 3 are known, and 2 plans may follow."""
    slots, drafting = Slots(LIMITS), Drafting(Slots(LIMITS), source := Fixed({}))
    drafting = Drafting(slots, source)
    step = plan(
        admitted=(sequence(0, [9, 8, 7], list(range(num_blocks)), computed=2, max_drafts=6, max_len=max_len),),
        decode_ready=True, max_drafts=6,
    )  # fmt: skip
    slots.apply(step)
    drafting.add(step, slots.schedule(step))
    assert source.asked == ({0: room} if room else {})


def test_rows_of_logits_and_tokens_of_the_step_are_limits() -> None:
    few = replace(LIMITS, max_num_seqs=6)
    slots, drafting, _ = begin({slot: [1, 2] for slot in range(3)}, few, slot0={}, slot1={}, slot2={})
    step = plan(decode_ready=True, max_drafts=2)
    work = drafting.add(step, slots.schedule(step))
    assert work.num_drafts.tolist() == [2, 1, 0]
    assert len(work.rows.slots) == 6


def test_the_source_hears_of_admissions_and_releases() -> None:
    slots, drafting, source = begin({}, slot0={"draft_scope": 5}, slot1={"max_drafts": 0})
    step = plan(released_slots=ints(0))
    slots.apply(step)
    drafting.follow(step)
    drafting.clear()
    assert source.calls == [("follow", 1), ("admitted", 0, 5), ("released", 0), ("follow", 1), ("clear",)]


def test_drafts_over_the_executors_limit_are_refused() -> None:
    slots = Slots(LIMITS)
    with pytest.raises(InvalidPlan, match="max_drafts 7"):
        slots.apply(plan(max_drafts=7))
    with pytest.raises(InvalidPlan, match="slot 0: max_drafts 7 is not 0 to 6"):
        slots.apply(plan(admitted=(sequence(0, [1], [0], max_drafts=7),)))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_steps_with_drafts_are_many_steps_without(data: st.DataObject) -> None:
    """Against a model in which the next token is a function of those before, stop tokens and min_tokens included."""
    vocab, token = 4, st.integers(0, 3)
    stops = data.draw(st.sets(token, max_size=1))
    least = data.draw(st.integers(0, 4))
    max_len = data.draw(st.integers(5, 20))

    def follows(tokens: list[int]) -> int:
        following = sum((index + 3) * each for index, each in enumerate(tokens)) % vocab
        early = len(tokens) - 2 < least
        return (following + 1) % vocab if early and following in stops else following

    expected = [9, 8, 7]
    while len(expected) < max_len:
        expected.append(follows(expected))
        if expected[-1] in stops and len(expected) - 2 >= least:
            break
    sampling = SequenceSampling(stop_token_ids=ints(*stops), min_tokens=least)
    slots, drafting, source = begin({}, slot3={"sampling": sampling, "max_len": max_len})
    while not slots.stopped[3]:
        known = slots.token_ids[3, : slots.num_tokens[3]].tolist()
        drafts = data.draw(st.lists(token, max_size=6))
        right = data.draw(st.integers(0, 6))
        for index in range(min(right, len(drafts))):
            drafts[index] = follows([*known, *drafts[:index]])
        source.drafts = {3: drafts}
        result = run(slots, drafting, follows)
        assert len(result.token_ids) >= 1
    assert slots.token_ids[3, : slots.num_tokens[3]].tolist() == expected
