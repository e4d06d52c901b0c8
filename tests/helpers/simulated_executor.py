"""An executor without a model: the plan protocol's semantics in plain Python, its KV cache real bookkeeping.

Each block position holds a digest of all tokens up to it, chained through what the block table reads back, and the next
token is a hash of the newest digest: a wrong block table, a block used too early or a wrong count gives wrong tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.types import AdmittedSequence, ExecutorSpec, StepPlan, StepResult

VOCAB_SIZE = 50


def digest(previous: bytes, token_id: int) -> bytes:
    return hashlib.sha256(previous + token_id.to_bytes(4, "little")).digest()


def next_token(state: bytes, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(state + seed.to_bytes(8, "little")).digest()[:4], "little") % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], seed: int, count: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """The tokens that a request must get, whatever it is batched with."""
    state = b""
    for token_id in prompt:
        state = digest(state, token_id)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(next_token(state, seed))
        if tokens[-1] in stop_ids:
            break
        state = digest(state, tokens[-1])
    return tokens


@dataclass
class Slot:
    admitted: AdmittedSequence
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    stopped: bool = False


@dataclass
class SimulatedExecutor:
    spec: ExecutorSpec
    slots: dict[int, Slot] = field(default_factory=dict)
    kv: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out a plan; every contradiction is an AssertionError."""
        for slot_id in plan.released_slots:
            del self.slots[slot_id]
        for admitted in plan.admitted:
            assert admitted.slot not in self.slots, f"slot {admitted.slot} is taken"
            assert 0 <= admitted.slot < self.spec.num_slots
            assert admitted.num_computed_tokens < len(admitted.token_ids)
            self.slots[admitted.slot] = Slot(
                admitted, list(admitted.token_ids), list(admitted.block_ids), admitted.num_computed_tokens
            )
        for slot_id, block_id in zip(plan.append_slots, plan.append_block_ids, strict=True):
            self.slots[slot_id].block_ids.append(block_id)
        work = dict(zip(plan.scheduled_slots, plan.scheduled_num_tokens, strict=True))
        samples = dict(zip(plan.scheduled_slots, plan.scheduled_samples, strict=True))
        if plan.decode_ready:
            for slot_id, slot in self.slots.items():
                # A stopped slot is not ready, though the plan's author does not know yet: it gets no answer.
                if slot_id not in work and not slot.stopped and len(slot.token_ids) - slot.num_computed == 1:
                    work[slot_id], samples[slot_id] = 1, True
        live = {slot_id: count for slot_id, count in work.items() if not self.slots[slot_id].stopped}
        assert len(live) <= self.spec.max_num_seqs
        assert sum(live.values()) <= self.spec.max_num_batched_tokens
        return self._result(plan, work, samples)

    def _result(self, plan: StepPlan, work: dict[int, int], samples: dict[int, bool]) -> StepResult:
        slots, counts, tokens = [], [], []
        for slot_id, count in work.items():
            slot = self.slots[slot_id]
            token = None if slot.stopped else self._compute(slot, count, samples[slot_id])
            if samples[slot_id]:
                slots.append(slot_id)
                counts.append(0 if token is None else 1)
                tokens += [] if token is None else [token]
        return StepResult(plan.step_id, slots=slots, num_tokens=counts, token_ids=tokens, total_ns=1000)

    def _compute(self, slot: Slot, count: int, sample: bool) -> int | None:
        assert count <= len(slot.token_ids) - slot.num_computed, "more tokens than are known"
        state = b""
        for position in range(slot.num_computed, slot.num_computed + count):
            previous = self.kv[self._place(slot, position - 1)] if position else b""
            state = digest(previous, slot.token_ids[position])
            self.kv[self._place(slot, position)] = state
        slot.num_computed += count
        if not sample:
            return None
        assert slot.num_computed == len(slot.token_ids), "a sample without all tokens computed"
        token = next_token(state, slot.admitted.sampling.seed)
        slot.token_ids.append(token)
        num_output = len(slot.token_ids) - slot.admitted.num_prompt_tokens
        sampling = slot.admitted.sampling
        if token in sampling.stop_token_ids and num_output >= sampling.min_tokens:
            slot.stopped = True
        return token

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.spec.block_size)
        assert index < len(slot.block_ids), f"position {position} is outside of the block table"
        return slot.block_ids[index], offset
