"""The slots, rule by rule: what contradicts them is named, what belonged to an earlier sequence is forgotten."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import BlockMoves, PrefixSource, StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.ragged import SlotLists
from executor_svc.batch.slots import Slots
from tests.helpers.executor.plans import columns, ints, plan, run, scheduled, sequence
from tests.helpers.scheduler.fake_executor import LIMITS


@pytest.fixture
def slots() -> Slots:
    """Slot 0 has sampled and is ready, slot 1 is in the middle of its prompt, slot 2 has nothing left to compute."""
    slots = Slots(LIMITS)
    first = plan(
        admitted=(sequence(0, [5], [0]), sequence(1, [6] * 9, [1, 2]), sequence(2, [7, 7], [3])),
        scheduled=scheduled((0, 1, True), (1, 4, False), (2, 2, False)),
    )
    run(slots, first, [9])
    return slots


REFUSED: list[tuple[StepPlan, str]] = [
    (plan(held_slots=ints(3)), "held_slots: slot 3 is not admitted"),
    (plan(resumed_slots=ints(3)), "resumed_slots: slot 3 is not admitted"),
    (plan(released_slots=ints(0, 0)), "slot 0 is named twice"),
    (plan(appends=columns((3, 9))), "appends: slot 3 is not admitted"),
    (plan(appends=columns((0, 64))), "appends: block 64"),
    (plan(appends=columns(*((0, block) for block in range(8)))), "block table of slot 0 would exceed 8"),
    (plan(given=columns((0, 4))), "given: slot 0 has known tokens that are not computed"),
    (plan(given=columns((2, 50))), "given: token id 50"),
    (plan(scheduled=scheduled((0, 2, True))), "slot 0 would compute 2 tokens, but only 1"),
    (plan(scheduled=scheduled((1, 4, True))), "slot 1 would sample after 4 of 5"),
    (plan(scheduled=scheduled((2, 0, True))), "slot 2 would sample after 0 of 0"),
    (plan(scheduled=scheduled((7, 1, True))), "scheduled: slot 7 is not admitted"),
    (plan(admitted=(sequence(3, [], []),)), "slot 3 has 0 tokens"),
    (plan(admitted=(sequence(3, [1] * 65, list(range(8))),)), "65 tokens"),
    (plan(admitted=(sequence(3, [1], [0], prompt=2),)), "num_prompt_tokens 2"),
    (plan(admitted=(sequence(3, [1], [0], 1),)), "num_computed_tokens 1"),
    (plan(admitted=(sequence(3, [1] * 9, [0], 8), sequence(4, [1] * 10, [0], 9))), "slot 4: 1 blocks are too few"),
    (plan(admitted=(sequence(3, [1], list(range(9))),)), "9 blocks"),
    (plan(admitted=(sequence(16, [1], [0]),)), "slot 16 is out of range"),
    (plan(copies=BlockMoves(ints(1, 2), ints(3, 3))), "block 3 is named twice"),
    (
        plan(swap_out=BlockMoves(ints(1), ints(3)), swap_in=BlockMoves(ints(3), ints(2))),
        "host block 3 is freed by a swap-in",
    ),
    (plan(reserved=("grammar",)), "not supported by this executor: grammar"),
    (plan(forks=columns((3, 0)), decode_ready=True), "forks: slot 3 is not admitted"),
    (plan(forks=columns((16, 0)), decode_ready=True), "forks: slot 16 is out of range"),
    (plan(forks=columns((2, 3)), decode_ready=True), "forks: source: slot 3 is not admitted"),
    (plan(forks=columns((2, 16)), decode_ready=True), "forks: source: slot 16 is out of range"),
    (plan(forks=columns((2, 0), (2, 0)), decode_ready=True), "forks: slot 2 is named twice"),
    (plan(forks=columns((0, 0)), decode_ready=True), "forks: slot 0 reads from a slot that is a fork itself"),
    (plan(forks=columns((1, 0), (2, 1)), decode_ready=True), "forks: slot 2 reads from a slot that is a fork itself"),
    (
        plan(forks=columns((2, 0)), decode_ready=True, scheduled=scheduled((2, 0, False))),
        "forks: slot 2 is named in scheduled too",
    ),
    (plan(forks=columns((2, 0))), "forks: the source 0 of slot 2 does not sample in this step"),
    (plan(forks=columns((2, 0)), held_slots=ints(0), decode_ready=True), "the source 0 of slot 2 does not sample"),
    (plan(forks=columns((2, 0)), scheduled=scheduled((0, 1, False)), decode_ready=True), "source 0 of slot 2 does not"),
    (plan(forks=columns((2, 1)), decode_ready=True), "the source 1 of slot 2 does not sample"),
    (plan(forks=columns((1, 0)), decode_ready=True), "slot 1 has 9 known tokens, its source 0 2"),
] + [
    (plan(admitted=(sequence(3, [1], [0], sampling=SequenceSampling(**fields)),)), message)
    for fields, message in (
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"num_logprobs": 51}, "num_logprobs 51"),
        ({"stop_token_ids": ints(50)}, "stop token id 50"),
        ({"stop_token_ids": ints(*range(50)), "min_tokens": 1}, "every token id"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is not above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty inf"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty nan"),
        ({"presence_penalty": float("nan")}, "presence_penalty nan is not finite"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty -inf is not finite"),
        ({"num_prompt_logprobs": 51}, "num_prompt_logprobs 51 is not 0 to max_logprobs 50"),
        ({"bias_token_ids": ints(50), "biases": np.ones(1, np.float32)}, "bias token id 50"),
        ({"bias_token_ids": ints(1, 1), "biases": np.ones(2, np.float32)}, "bias token id 1 is named twice"),
        ({"bias_token_ids": ints(1), "biases": np.ones(2, np.float32)}, "biases: 2 values for 1"),
        ({"bias_token_ids": ints(4), "biases": np.full(1, np.nan, np.float32)}, "biases: nan of token id 4"),
        ({"allowed_token_ids": ints(3, 50)}, "allowed token id 50"),
        ({"bad_words": (ints(1), ints())}, "bad_words: word 1 is empty"),
        ({"bad_words": (ints(1, 50),)}, "bad_words: token id 50"),
        ({"num_candidates": 51}, "slot 3: num_candidates 51 is not 0 to 50"),
        ({"num_candidates": -1}, "slot 3: num_candidates -1 is not 0 to 50"),
    )
]


@pytest.mark.parametrize(("step", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_contradictions_are_named(slots: Slots, step: StepPlan, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        run(slots, step, [])


def test_step_limits(slots: Slots) -> None:
    long = tuple(sequence(3 + i, [1] * 30, list(range(4))) for i in range(3))
    rows = [(3 + i, 30, True) for i in range(3)]
    with pytest.raises(InvalidPlan, match="90 tokens are scheduled: over max_num_batched_tokens 64"):
        run(slots, plan(admitted=long, scheduled=scheduled(*rows)), [1, 1, 1])


def test_ready_slots_need_a_block_table() -> None:
    slots = Slots(LIMITS)
    run(slots, plan(admitted=(sequence(0, [1] * 8, [0]),), scheduled=scheduled((0, 8, True))), [3])
    with pytest.raises(InvalidPlan, match="block table of slot 0 is too short: 9 tokens"):
        run(slots, plan(decode_ready=True), [3])


def test_a_sequence_ends_at_max_model_len() -> None:
    slots = Slots(LIMITS)
    full = sequence(0, [1] * 64, list(range(8)), 63)
    assert run(slots, plan(admitted=(full,), decode_ready=True), [3]) == [0]
    with pytest.raises(InvalidPlan, match="slot 0 would exceed max_model_len 64"):
        run(slots, plan(decode_ready=True), [3])


def test_last_prompt_token_alone_is_ready(slots: Slots) -> None:
    """A chunk that leaves one token makes its slot ready, exactly as execution.proto defines it."""
    assert run(slots, plan(scheduled=scheduled((1, 4, False))), []) == [1]
    assert run(slots, plan(decode_ready=True), [8, 8]) == [0, 1]


def test_stop_ids_of_an_earlier_sequence_are_forgotten() -> None:
    slots = Slots(LIMITS)
    many = SequenceSampling(stop_token_ids=ints(*range(20, 40)))
    run(slots, plan(admitted=(sequence(0, [1], [0], sampling=many),), decode_ready=True), [25])
    assert slots.stopped[0]
    few = SequenceSampling(stop_token_ids=ints(3))
    run(slots, plan(released_slots=ints(0), admitted=(sequence(0, [1], [0], sampling=few),), decode_ready=True), [25])
    assert not slots.stopped[0]


STOPPING = SequenceSampling(stop_token_ids=ints(9))


def test_a_fork_goes_on_like_its_source(slots: Slots) -> None:
    """Slot 2 has two known tokens like slot 0, which is about to sample; slot 4 comes for it and stops at once."""
    twin = sequence(4, [5, 9], [5], sampling=STOPPING)
    forked = plan(admitted=(twin,), forks=columns((4, 0), (2, 0)), decode_ready=True)
    assert run(slots, forked, [20, 21, 9]) == [0]
    assert slots.num_tokens[[0, 2, 4]].tolist() == [3, 3, 3]
    assert slots.num_computed_tokens[[0, 2, 4]].tolist() == [2, 2, 2]
    assert slots.token_ids[[0, 2, 4], 2].tolist() == [20, 21, 9]
    assert slots.stopped[[0, 2, 4]].tolist() == [False, False, True]
    assert run(slots, plan(decode_ready=True), [30, 31]) == [0, 2]


@pytest.mark.parametrize("named", [True, False], ids=["named in scheduled", "under decode_ready"])
def test_a_fork_of_a_stopped_slot_stops(slots: Slots, named: bool) -> None:
    run(slots, plan(admitted=(sequence(3, [8], [4], sampling=STOPPING),), decode_ready=True), [20, 9])
    assert slots.stopped[3]
    late = sequence(4, [8, 7], [5])
    rows = {"scheduled": scheduled((3, 1, True))} if named else {"decode_ready": True}
    step = plan(admitted=(late,), forks=columns((4, 3)), **rows)
    slots.apply(step)
    got = slots.schedule(step)
    assert got.idle_slots.tolist() == ([3, 4] if named else [4])
    assert 4 not in got.sampling_slots
    slots.commit(got, ints(*[7] * len(got.sampling_slots)), np.ones(len(got.sampling_slots), np.bool_))
    assert slots.stopped[4]
    assert not slots.ready()[4]
    with pytest.raises(InvalidPlan, match="forks: slot 4 has stopped"):
        run(slots, plan(forks=columns((4, 0)), decode_ready=True), [1])


@pytest.mark.parametrize(
    "step",
    [
        plan(forks=columns((2, 3)), decode_ready=True, held_slots=ints(3)),
        plan(forks=columns((2, 3)), decode_ready=True, scheduled=scheduled((3, 1, False))),
        plan(forks=columns((2, 3)), scheduled=scheduled((3, 1, False))),
        plan(forks=columns((2, 3))),
    ],
    ids=["held", "not to sample", "not to sample, nobody ready", "not named"],
)
def test_a_stopped_source_must_have_been_scheduled_to_sample(slots: Slots, step: StepPlan) -> None:
    run(slots, plan(admitted=(sequence(3, [8], [4], sampling=STOPPING),), decode_ready=True), [20, 9])
    with pytest.raises(InvalidPlan, match="forks: the source 3 of slot 2 does not sample in this step"):
        run(slots, step, [7])


def test_forks_count_among_the_rows_of_a_step() -> None:
    slots = Slots(LIMITS)
    twins = tuple(sequence(slot, [5], [slot]) for slot in range(9))
    step = plan(admitted=twins, scheduled=scheduled((0, 1, True)), forks=columns(*((slot, 0) for slot in range(1, 9))))
    with pytest.raises(InvalidPlan, match="forks: 9 slots would sample: over max_num_seqs 8"):
        run(slots, step, [])


def with_source(slot: int, *source: int, tokens: tuple[int, ...] = (), blocks: tuple[int, ...] = ()) -> StepPlan:
    """A plan that admits a sequence of two prompt tokens with a source: slot, number of tokens, number of blocks."""
    return plan(admitted=(sequence(slot, list(tokens), list(blocks), prompt=2, source=PrefixSource(*source)),))


def test_a_sequence_takes_its_first_tokens_and_blocks_from_its_source() -> None:
    slots = Slots(LIMITS)
    slots.apply(plan(admitted=(sequence(1, [5, 6, 9], [3, 2], 0, prompt=2),)))
    complete = slots.apply(with_source(4, 1, 2, 1, tokens=(8,), blocks=(7,)))
    (whole,) = complete.admitted
    assert (whole.token_ids.tolist(), whole.block_ids.tolist(), whole.source) == ([5, 6, 8], [3, 7], None)
    assert slots.token_ids[4, :3].tolist() == [5, 6, 8]
    assert slots.block_tables[4, :2].tolist() == [3, 7]
    assert (slots.num_tokens[4], slots.num_blocks[4], slots.num_prompt_tokens[4]) == (3, 2, 2)


def test_a_source_may_come_in_the_same_plan_and_its_slot_may_be_used_again_later() -> None:
    slots = Slots(LIMITS)
    first = sequence(1, [5, 6], [3], 0)
    slots.apply(plan(admitted=(first, *with_source(4, 1, 2, 1).admitted)))
    slots.apply(plan(released_slots=ints(1), admitted=(sequence(1, [8], [9], 0),)))
    assert slots.token_ids[4, :2].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (with_source(4, 2, 1, 0), "slot 2 is not admitted"),
        (with_source(4, 99, 1, 0), "slot 99 is out of range"),
        (with_source(4, 1, 3, 0, tokens=(1,)), "source 1 has 2 prompt tokens and 1 blocks, not 3 and 0"),
        (with_source(4, 1, 2, 2), "source 1 has 2 prompt tokens and 1 blocks, not 2 and 2"),
        (with_source(4, 1, 0, 0), "slot 4 has 0 tokens"),
        (with_source(4, 4, 1, 0), "slot 4 is not admitted"),
    ],
    ids=["free", "no slot", "output of the source", "too many blocks", "no tokens", "itself"],
)
def test_a_wrong_source_is_named(step: StepPlan, problem: str) -> None:
    slots = Slots(LIMITS)
    slots.apply(plan(admitted=(sequence(1, [5, 6, 7], [3], 0, prompt=2),)))
    with pytest.raises(InvalidPlan, match=problem):
        slots.apply(step)


def test_candidates_wait_for_a_given_token() -> None:
    """Which stops nothing, whatever it is."""
    slots = Slots(LIMITS)
    asking = SequenceSampling(num_candidates=4, stop_token_ids=ints(9))
    assert run(slots, plan(admitted=(sequence(0, [5], [0], sampling=asking),), decode_ready=True), [7]) == [0]
    assert (slots.num_tokens[0], slots.num_computed_tokens[0], slots.stopped[0]) == (1, 1, False)
    assert run(slots, plan(decode_ready=True), []) == []
    assert run(slots, plan(given=columns((0, 9)), decode_ready=True), [7]) == [0]
    assert slots.token_ids[0, :2].tolist() == [5, 9]
    assert not slots.stopped[0]


def test_a_slot_whose_candidates_fail_stops() -> None:
    slots = Slots(LIMITS)
    step = plan(
        admitted=(sequence(0, [5], [0], sampling=SequenceSampling(num_candidates=4)),),
        scheduled=scheduled((0, 1, True)),
    )
    slots.apply(step)
    slots.commit(slots.schedule(step), ints(7), np.zeros(1, np.bool_))
    assert slots.stopped[0]


def test_clear_frees_all(slots: Slots) -> None:
    slots.clear()
    assert not slots.ready().any()
    assert run(slots, plan(admitted=(sequence(0, [1], [0]),), decode_ready=True), [3]) == [0]


def test_limits_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LIMITS.num_slots = 3  # type: ignore[misc]


def test_counts_of_an_earlier_sequence_are_forgotten() -> None:
    slots = Slots(LIMITS)
    penalised = SequenceSampling(frequency_penalty=0.5, repetition_penalty=2.0)
    for tokens in ([7, 8], [9]):
        admitted = sequence(0, tokens, [0], sampling=penalised)
        released = ints(0) if slots.admitted[0] else ints()
        run(
            slots, plan(released_slots=released, admitted=(admitted,), scheduled=scheduled((0, len(tokens), True))), [7]
        )
    _, ids, counts = slots.sampling.read_counts(ints(0))
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {9: 0, 7: 1}


def test_lists_of_slots_follow_every_change() -> None:
    """Against a dictionary: lists are replaced, forgotten and moved, and what is in use bounds the memory."""
    rng = np.random.default_rng(0)
    lists, naive = SlotLists(20, np.int32, np.float32), dict[int, list[int]]()
    for _ in range(600):
        slot, length = int(rng.integers(20)), int(rng.integers(0, 30))
        values = rng.integers(0, 1000, length)
        lists.put(slot, values, values / 2)
        naive[slot] = values.tolist()
        gone = rng.permutation(20)[:2]
        lists.forget(gone)
        naive.update({int(slot): [] for slot in gone})
        slots = rng.permutation(20)[:7]
        owner, places = lists.locate(slots)
        expected = [(i, v, v / 2) for i, slot in enumerate(slots) for v in naive.get(int(slot), [])]
        assert list(zip(owner, lists.columns[0][places], lists.columns[1][places], strict=True)) == expected
    assert len(lists.columns[0]) <= 2 * 20 * 30
