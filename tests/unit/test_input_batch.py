"""The slots and the batches built from them, against a naive model: lists per sequence, loops over tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executor_svc.input_batch import build_batch, sampling_columns
from executor_svc.plan import (
    AdmittedSequence,
    BlockMoves,
    InvalidPlan,
    ScheduledTokens,
    SequenceSampling,
    SlotColumns,
    StepPlan,
)
from executor_svc.slots import Slots
from tests.helpers.fake_executor import LIMITS

BLOCK = LIMITS.block_size


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def sequence(slot: int, tokens: list[int], blocks: list[int], computed: int = 0, **fields: Any) -> AdmittedSequence:
    sampling = fields.pop("sampling", SequenceSampling())
    prompt = fields.pop("prompt", len(tokens))
    return AdmittedSequence(slot, ints(*tokens), prompt, computed, ints(*blocks), sampling, **fields)


def plan(**fields: Any) -> StepPlan:
    return StepPlan(step_id=1, epoch=1, **fields)


def scheduled(*rows: tuple[int, int, bool]) -> ScheduledTokens:
    slots, counts, samples = zip(*rows, strict=True)
    return ScheduledTokens(ints(*slots), ints(*counts), np.array(samples, np.bool_))


# ---------------------------------------------------------------- the naive model


@dataclass
class Naive:
    """One sequence."""

    tokens: list[int]
    prompt: int
    computed: int
    blocks: list[int]
    stop: set[int]
    min_tokens: int
    held: bool
    stopped: bool = False
    seed: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def ready(self) -> bool:
        return not self.held and not self.stopped and self.left == 1

    def room(self) -> int:
        """Tokens that can still be computed."""
        return min(self.left, len(self.blocks) * BLOCK - self.computed, LIMITS.max_model_len - self.computed)

    def sample(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.stop and len(self.tokens) - self.prompt >= self.min_tokens:
            self.stopped = True


class SlotsMachine(RuleBasedStateMachine):
    """Random valid plans; after each, every array must say what the naive model says."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(LIMITS)
        self.naive: dict[int, Naive] = {}
        self.next_block = 0
        self.step = 0

    def _blocks(self, count: int) -> list[int]:
        self.next_block += count
        return [(self.next_block + i) % LIMITS.num_device_blocks for i in range(count)]

    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        draw = data.draw
        self.step += 1
        released = [s for s in sorted(self.naive) if draw(st.integers(0, 5)) == 0]
        for slot in released:
            del self.naive[slot]
        admitted = [self._admit(draw, slot) for slot in self._free(draw)]
        appends = self._append(draw)
        held = [s for s in self.naive if draw(st.integers(0, 7)) == 0]
        for slot in held:
            self.naive[slot].held = True
        resumed = [s for s in self.naive if self.naive[s].held and draw(st.booleans())]
        for slot in resumed:
            self.naive[slot].held = False
        given = self._give(draw)
        decode_ready = draw(st.booleans())
        explicit = self._schedule(draw, decode_ready)
        if explicit is None:
            explicit, decode_ready = [], False
        self._run(
            plan(
                released_slots=ints(*released),
                admitted=tuple(admitted),
                appends=SlotColumns(ints(*[s for s, _ in appends]), ints(*[b for _, b in appends])),
                held_slots=ints(*held),
                resumed_slots=ints(*resumed),
                given=SlotColumns(ints(*[s for s, _ in given]), ints(*[t for _, t in given])),
                decode_ready=decode_ready,
                scheduled=scheduled(*explicit) if explicit else ScheduledTokens(),
            ),
            explicit,
            draw,
        )

    def _free(self, draw: Any) -> list[int]:
        free = [s for s in range(LIMITS.num_slots) if s not in self.naive]
        count = draw(st.integers(0, max(0, min(2, 10 - len(self.naive), len(free)))))
        return draw(st.permutations(free))[:count]

    def _admit(self, draw: Any, slot: int) -> AdmittedSequence:
        tokens = draw(st.lists(st.integers(0, 49), min_size=1, max_size=30))
        prompt = draw(st.integers(1, len(tokens)))
        computed = draw(st.one_of(st.just(0), st.just(len(tokens) - 1), st.integers(0, len(tokens) - 1)))
        blocks = self._blocks(draw(st.integers(-(-computed // BLOCK), 5)))
        stop = draw(st.lists(st.integers(0, 49), max_size=12, unique=True))
        sampling = SequenceSampling(
            temperature=draw(st.sampled_from([0.0, 0.5])),
            seed=draw(st.integers(0, 2**64 - 1)),
            sample_index=slot,
            stop_token_ids=ints(*stop),
            min_tokens=draw(st.integers(0, 4)),
        )
        held = draw(st.integers(0, 4)) == 0
        self.naive[slot] = Naive(
            list(tokens), prompt, computed, list(blocks), set(stop), sampling.min_tokens, held, seed=sampling.seed
        )
        return sequence(slot, tokens, blocks, computed, prompt=prompt, sampling=sampling, held=held)

    def _append(self, draw: Any) -> list[tuple[int, int]]:
        appends = []
        for slot, state in self.naive.items():
            for block in self._blocks(draw(st.integers(0, min(2, LIMITS.max_blocks_per_seq - len(state.blocks))))):
                state.blocks.append(block)
                appends.append((slot, block))
        # Blocks of several slots may come interleaved; those of one slot keep their order.
        return (
            sorted(appends, key=lambda pair: pair[1] % 3) if len({s for s, _ in appends}) == len(appends) else appends
        )

    def _give(self, draw: Any) -> list[tuple[int, int]]:
        given = []
        for slot, state in self.naive.items():
            if state.left == 0 and len(state.tokens) < LIMITS.max_model_len and draw(st.booleans()):
                token = draw(st.integers(0, 49))
                state.tokens.append(token)
                given.append((slot, token))
        return given

    def _schedule(self, draw: Any, decode_ready: bool) -> list[tuple[int, int, bool]] | None:
        """Explicit rows that fit all limits together with the ready slots; None if those alone do not fit."""
        explicit: list[tuple[int, int, bool]] = []
        named: set[int] = set()
        for slot, state in self.naive.items():
            if state.stopped:
                if draw(st.booleans()):
                    explicit.append((slot, draw(st.integers(1, 3)), draw(st.booleans())))
                    named.add(slot)
            elif state.room() > 0 and draw(st.booleans()):
                count = draw(st.one_of(st.just(state.room()), st.integers(1, state.room())))
                samples = count == state.left and draw(st.booleans())
                explicit.append((slot, count, samples))
                named.add(slot)
        ready = [s for s in self.naive if decode_ready and self.naive[s].ready and s not in named]
        live = [row for row in explicit if not self.naive[row[0]].stopped]
        fits = len(live) + len(ready) <= LIMITS.max_num_seqs
        fits &= sum(row[1] for row in live) + len(ready) <= LIMITS.max_num_batched_tokens
        return explicit if fits and all(self.naive[s].room() > 0 for s in ready) else None

    def _run(self, step: StepPlan, explicit: list[tuple[int, int, bool]], draw: Any) -> None:
        expected: dict[int, tuple[int, bool]] = {}
        if step.decode_ready:
            expected = {s: (1, True) for s, state in self.naive.items() if state.ready}
        for slot, count, samples in explicit:
            expected.pop(slot, None)
            if not self.naive[slot].stopped:
                expected[slot] = (count, samples)
        self.slots.apply(step)
        got = self.slots.schedule(step)
        order = sorted(expected)
        assert got.slots.tolist() == order
        assert got.num_tokens.tolist() == [expected[s][0] for s in order]
        assert got.samples.tolist() == [expected[s][1] for s in order]
        assert got.idle_slots.tolist() == sorted(s for s, _, samples in explicit if samples and self.naive[s].stopped)
        self._check_batch(got, order, expected)
        tokens, valid = [], []
        for slot in order:
            count, samples = expected[slot]
            state = self.naive[slot]
            state.computed += count
            if samples:
                tokens.append(draw(st.one_of(st.sampled_from(sorted(state.stop) or [0]), st.integers(0, 49))))
                valid.append(draw(st.integers(0, 9)) > 0)
                if valid[-1]:
                    state.sample(tokens[-1])
                else:
                    state.stopped = True
        self.slots.commit(got, ints(*tokens), np.array(valid, np.bool_))

    def _check_batch(self, got: Any, order: list[int], expected: dict[int, tuple[int, bool]]) -> None:
        batch = build_batch(self.slots, got)
        if not order:
            assert batch is None
            return
        assert batch is not None
        token_ids, positions, mapping, starts, lens, rows = [], [], [], [0], [], []
        masked, sampling = [], []
        for slot in order:
            state, (count, samples) = self.naive[slot], expected[slot]
            for position in range(state.computed, state.computed + count):
                token_ids.append(state.tokens[position])
                positions.append(position)
                mapping.append(state.blocks[position // BLOCK] * BLOCK + position % BLOCK)
            starts.append(len(token_ids))
            lens.append(state.computed + count)
            if samples:
                rows.append(len(token_ids) - 1)
                if len(state.tokens) - state.prompt < state.min_tokens:
                    masked += [(len(sampling), token) for token in state.stop]
                sampling.append((slot, state.seed, len(state.tokens)))
        assert batch.token_ids.tolist() == token_ids
        assert batch.positions.tolist() == positions
        assert batch.slot_mapping.tolist() == mapping
        assert batch.query_start_loc.tolist() == starts
        assert batch.seq_lens.tolist() == lens
        assert batch.logits_rows.tolist() == rows
        assert batch.max_query_len == max(expected[s][0] for s in order)
        assert batch.max_seq_len == max(lens)
        for row, slot, length in zip(batch.block_tables.tolist(), order, lens, strict=True):
            used = -(-length // BLOCK)
            assert row[:used] == self.naive[slot].blocks[:used]
            assert all(0 <= block < LIMITS.num_device_blocks for block in row)
        columns = sampling_columns(self.slots, got)
        assert list(zip(columns.sample_index, columns.seed.tolist(), columns.position, strict=True)) == sampling
        assert sorted(zip(columns.masked_rows.tolist(), columns.masked_ids.tolist(), strict=True)) == sorted(masked)

    @invariant()
    def mirrors_agree(self) -> None:
        slots = self.slots
        assert np.flatnonzero(slots.admitted).tolist() == sorted(self.naive)
        assert np.flatnonzero(slots.ready()).tolist() == sorted(s for s in self.naive if self.naive[s].ready)
        sha = hashlib.sha256()
        for slot, state in sorted(self.naive.items()):
            assert slots.token_ids[slot, : slots.num_tokens[slot]].tolist() == state.tokens
            assert slots.block_tables[slot, : slots.num_blocks[slot]].tolist() == state.blocks
            assert slots.stopped[slot] == state.stopped
            numbers = [slot, len(state.tokens), state.prompt, state.computed, len(state.blocks)]
            numbers += state.tokens + state.blocks
            sha.update(struct.pack(f"<{len(numbers)}i", *numbers))
        assert slots.digest() == sha.digest()


SlotsMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=12, deadline=None, derandomize=True)
TestSlots = SlotsMachine.TestCase


# ---------------------------------------------------------------- single rules


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


def run(slots: Slots, step: StepPlan, tokens: list[int]) -> list[int]:
    """Run a step that samples these; returns the slots computed."""
    slots.apply(step)
    got = slots.schedule(step)
    slots.commit(got, ints(*tokens), np.ones(len(tokens), np.bool_))
    return got.slots.tolist()


REFUSED: list[tuple[StepPlan, str]] = [
    (plan(held_slots=ints(3)), "held_slots: slot 3 is not admitted"),
    (plan(resumed_slots=ints(3)), "resumed_slots: slot 3 is not admitted"),
    (plan(released_slots=ints(0, 0)), "slot 0 is named twice"),
    (plan(appends=SlotColumns(ints(3), ints(9))), "appends: slot 3 is not admitted"),
    (plan(appends=SlotColumns(ints(0), ints(64))), "appends: block 64"),
    (plan(appends=SlotColumns(ints(*[0] * 8), ints(*range(8)))), "block table of slot 0 would exceed 8"),
    (plan(given=SlotColumns(ints(0), ints(4))), "given: slot 0 has known tokens that are not computed"),
    (plan(given=SlotColumns(ints(2), ints(50))), "given: token id 50"),
    (plan(scheduled=scheduled((0, 2, True))), "slot 0 is to compute 2 tokens, but only 1"),
    (plan(scheduled=scheduled((1, 4, True))), "slot 1 is to sample after 4 of 5"),
    (plan(scheduled=scheduled((2, 0, True))), "slot 2 is to sample after 0 of 0"),
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
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"num_prompt_logprobs": 0}, "num_prompt_logprobs"),
        ({"bias_token_ids": ints(1)}, "biases"),
        ({"allowed_token_ids": ints(1)}, "allowed_token_ids"),
        ({"bad_words": (ints(1),)}, "bad_words"),
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


def test_clear_frees_all(slots: Slots) -> None:
    slots.clear()
    assert not slots.ready().any()
    assert run(slots, plan(admitted=(sequence(0, [1], [0]),), decode_ready=True), [3]) == [0]


def test_limits_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LIMITS.num_slots = 3  # type: ignore[misc]
