"""The slots and the batches built from them, against a naive model: lists per sequence, loops over tokens."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.forward_batch import build_batch
from executor_svc.batch.prompt_rows import prompt_rows
from executor_svc.batch.slot_digest import digest_of
from executor_svc.batch.slots import Slots
from executor_svc.sampling.columns import candidate_columns, sampling_columns
from tests.helpers.executor.naive_slots import Naive, by_row
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence
from tests.helpers.scheduler.fake_executor import LIMITS

BLOCK = LIMITS.block_size


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
        forks = self._fork(draw, decode_ready, explicit, admitted)
        self._run(
            plan(
                released_slots=ints(*released),
                admitted=tuple(admitted),
                appends=columns(*appends),
                held_slots=ints(*held),
                resumed_slots=ints(*resumed),
                given=columns(*given),
                decode_ready=decode_ready,
                scheduled=scheduled(*explicit),
                forks=columns(*forks),
            ),
            explicit,
            dict(forks),
            draw,
        )

    def _free(self, draw: Any) -> list[int]:
        free = [s for s in range(LIMITS.num_slots) if s not in self.naive]
        count = draw(st.integers(0, max(0, min(2, 10 - len(self.naive), len(free)))))
        return draw(st.permutations(free))[:count]

    def _admit(self, draw: Any, slot: int, tokens: list[int] | None = None) -> AdmittedSequence:
        if tokens is None:
            tokens = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 49)), min_size=1, max_size=30))
        prompt = draw(st.integers(1, len(tokens)))
        computed = draw(st.one_of(st.just(0), st.just(len(tokens) - 1), st.integers(0, len(tokens) - 1)))
        needed = -(-computed // BLOCK)
        blocks = self._blocks(draw(st.integers(needed, max(needed, 5))))
        stop = draw(st.lists(st.integers(0, 49), max_size=12, unique=True))
        sampling = SequenceSampling(
            temperature=draw(st.sampled_from([0.0, 0.5])),
            seed=draw(st.integers(0, 2**64 - 1)),
            sample_index=slot,
            stop_token_ids=ints(*stop),
            min_tokens=draw(st.integers(0, 4)),
            num_prompt_logprobs=draw(st.sampled_from([None, 0, 3])),
            num_candidates=draw(st.sampled_from([0, 0, 0, 4])),
            **self._processors(draw),
        )
        held = draw(st.integers(0, 4)) == 0
        self.naive[slot] = Naive(
            list(tokens), prompt, computed, list(blocks), set(stop), sampling.min_tokens, held, sampling=sampling
        )
        return sequence(slot, tokens, blocks, computed, prompt=prompt, sampling=sampling, held=held)

    def _processors(self, draw: Any) -> dict[str, Any]:
        """Few token ids, so that words end, histories repeat and lists overlap."""
        if draw(st.booleans()):
            return {}
        few = st.integers(0, 5)
        bias = draw(st.dictionaries(few, st.floats(-9, 9, width=32), max_size=3))
        words = draw(st.lists(st.lists(few, min_size=1, max_size=3), max_size=4))
        return {
            "bias_token_ids": ints(*bias),
            "biases": np.array(list(bias.values()), np.float32),
            "allowed_token_ids": ints(*draw(st.lists(st.integers(0, 49), max_size=5))),
            "bad_words": tuple(ints(*word) for word in words),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.5])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.25])),
            "presence_penalty": draw(st.sampled_from([0.0, -0.5])),
        }

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

    def _fork(
        self, draw: Any, decode_ready: bool, explicit: list[tuple[int, int, bool]], admitted: list[AdmittedSequence]
    ) -> list[tuple[int, int]]:
        """(slot, source): of those that sample or would had they not stopped, forks of equal length, new and old."""
        named = {row[0] for row in explicit}
        sampling = [slot for slot, _, samples in explicit if samples]
        if decode_ready:
            sampling += [s for s, n in self.naive.items() if s not in named and not n.held and (n.ready or n.stopped)]
        sources = [s for s in sampling if draw(st.booleans())]
        others = [s for s, n in self.naive.items() if s not in (*named, *sources) and not n.stopped]
        room = LIMITS.max_num_seqs - sum(not self.naive[s].stopped for s in sampling)
        forks: list[tuple[int, int]] = []
        for source in sources:
            state = self.naive[source]
            for slot in self._free(draw)[: max(0, room - len(forks))]:
                admitted.append(self._admit(draw, slot, state.tokens[: LIMITS.max_model_len]))
                forks.append((slot, source))
            for slot in others:
                as_long = state.stopped or len(self.naive[slot].tokens) == len(state.tokens)
                if as_long and slot not in dict(forks) and len(forks) < room and draw(st.booleans()):
                    forks.append((slot, source))
        return draw(st.permutations(forks))

    def _run(self, step: StepPlan, explicit: list[tuple[int, int, bool]], forks: dict[int, int], draw: Any) -> None:
        expected: dict[int, tuple[int, bool]] = {}
        if step.decode_ready:
            expected = {s: (1, True) for s, state in self.naive.items() if state.ready and s not in forks}
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
        idle_forks = [slot for slot, source in forks.items() if self.naive[source].stopped]
        idle = [s for s, _, samples in explicit if samples and self.naive[s].stopped] + idle_forks
        assert got.idle_slots.tolist() == sorted(idle)
        # Who reads which logits row: the rows are those of the slots that compute and sample, in their order.
        rows = [slot for slot in order if expected[slot][1]]
        live = {slot: source for slot, source in forks.items() if slot not in idle_forks}
        readers = {slot: rows.index(live.get(slot, slot)) for slot in sorted({*rows, *live})}
        self._check_readers(got, readers)
        self._check_batch(got, order, expected)
        for slot in order:
            self.naive[slot].computed += expected[slot][0]
        tokens, valid = [], []
        for slot in readers:
            state = self.naive[slot]
            state.computed = len(state.tokens)
            tokens.append(draw(st.one_of(st.sampled_from(sorted(state.stop) or [0]), st.integers(0, 5))))
            valid.append(draw(st.integers(0, 9)) > 0)
            if not valid[-1]:
                state.stopped = True
            elif not state.sampling.num_candidates:
                state.sample(tokens[-1])
        for slot in idle_forks:
            self.naive[slot].stopped = True
        self.slots.commit(got, ints(*tokens), np.array(valid, np.bool_))

    def _check_readers(self, got: Any, readers: dict[int, int]) -> None:
        assert got.sampling_slots.tolist() == list(readers)
        if got.sources is None:
            assert list(readers.values()) == list(range(len(readers)))
        else:
            assert got.sources.tolist() == list(readers.values())
        asking = [slot for slot in readers if self.naive[slot].sampling.num_candidates]
        assert got.sampling_slots[got.candidates].tolist() == asking
        drawing = [slot for slot in readers if slot not in asking]
        drawn = sampling_columns(self.slots, got)
        seeds = [(slot, self.naive[slot].sampling.seed, len(self.naive[slot].tokens)) for slot in drawing]
        assert list(zip(drawn["sample_index"], drawn["seed"].tolist(), drawn.position, strict=True)) == seeds
        self._check_sources_and_edits(drawn, drawing, readers)
        if asking:
            columns = candidate_columns(self.slots, got)
            assert columns.num_candidates.tolist() == [4] * len(asking)
            self._check_sources_and_edits(columns, asking, readers)

    def _check_sources_and_edits(self, columns: Any, slots: list[int], readers: dict[int, int]) -> None:
        sources = range(len(slots)) if columns.sources is None else columns.sources.tolist()
        assert list(sources) == [readers[slot] for slot in slots]
        edits = {row: edits for row, slot in enumerate(slots) if any(edits := self.naive[slot].edits())}
        assert by_row(columns.edits) == edits

    def _check_batch(self, got: Any, order: list[int], expected: dict[int, tuple[int, bool]]) -> None:
        batch = build_batch(self.slots, got)
        if not order:
            assert batch is None
            return
        assert batch is not None
        token_ids, positions, mapping, starts, lens, rows = [], [], [], [0], [], []
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
        assert batch.token_ids.tolist() == token_ids
        assert batch.positions.tolist() == positions
        assert batch.slot_mapping.tolist() == mapping
        assert batch.query_start_loc.tolist() == starts
        assert batch.seq_lens.tolist() == lens
        assert batch.logits_rows.tolist() == rows
        for row, slot, length in zip(batch.block_tables.tolist(), order, lens, strict=True):
            used = -(-length // BLOCK)
            assert row[:used] == self.naive[slot].blocks[:used]
            assert all(0 <= block < LIMITS.num_device_blocks for block in row)
        self._check_prompt_rows(got, order, expected)

    def _check_prompt_rows(self, got: Any, order: list[int], expected: dict[int, tuple[int, bool]]) -> None:
        wanted, first = [], 0
        for slot in order:
            state, count = self.naive[slot], expected[slot][0]
            for row, position in enumerate(range(state.computed, state.computed + count), first):
                if state.sampling.num_prompt_logprobs is not None and position + 1 < state.prompt:
                    wanted.append((slot, position + 1, row, state.tokens[position + 1]))
            first += count
        prompt = prompt_rows(self.slots, got)
        if prompt is None:
            assert not wanted
            return
        assert prompt.num_top.tolist() == [self.naive[slot].sampling.num_prompt_logprobs for slot in prompt.slots]
        slots_and_starts = [
            (slot, start + i)
            for slot, start, count in zip(prompt.slots, prompt.starts, prompt.counts, strict=True)
            for i in range(count)
        ]
        rows = zip(slots_and_starts, prompt.rows, prompt.token_ids, strict=True)
        assert [(*place, row, token) for place, row, token in rows] == wanted

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
        assert digest_of(slots) == sha.digest()


SlotsMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None, derandomize=True)
TestSlots = pytest.mark.slow(SlotsMachine.TestCase)
